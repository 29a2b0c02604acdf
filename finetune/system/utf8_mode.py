"""Python's UTF-8 mode: file names, text files and output are UTF-8 whatever the locale says."""

import os
import sys
from pathlib import Path

_PROGRAMS = ("finetune", "__main__")  # the console script, and `python -m finetune`


def enter_utf8_mode() -> None:
    """Start the interpreter of a `finetune` command again in UTF-8 mode if the locale has another encoding.

    Otherwise Python decodes file names and arguments by the locale, and cannot print others. From Python 3.15 on the
    mode is the default (PEP 686). The process stays the same, and so do its number, its arguments and its open files.
    """
    is_utf8 = sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8"
    if is_utf8 or not sys.executable or Path(sys.argv[0]).stem not in _PROGRAMS:
        return
    os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
