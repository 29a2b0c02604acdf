"""Texts for users: errors of wrong usage, suggestions, numbers with units, escaped names, and the log."""

import difflib
import dis
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from finetune.system.terminal import colored

# Characters that are escaped on a page or a terminal: control characters, line breaks, and bytes that are not UTF-8.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"  # begins the paths of our modules


class WrongUsage(ValueError):
    """An option has a value that is invalid for any data. The exit code is that of a mistyped flag.

    Attributes:
        text: What is wrong.
        setting: The full name of the setting, such as data.batch_size, with which the message begins; "" for none. The
            command line writes it as it is typed there.
    """

    exit_code = 2

    def __init__(self, text: object = "", setting: str = "") -> None:
        super().__init__(text)
        self.text = str(text)
        self.setting = setting

    def __str__(self) -> str:
        return f"{self.setting} {self.text}" if self.setting else self.text


class NotFound(WrongUsage, FileNotFoundError):
    """A file or folder that an option names does not exist."""


def is_raised_for_user(error: BaseException) -> bool:
    """Return whether a `raise` statement of finetune has raised an error, or it was not raised at all."""
    origin = _origin(error)
    return origin is None or origin == (True, True)


def is_bug(error: BaseException) -> bool:
    """Return whether a call or an operation in our code, such as `int(text)`, has raised an error."""
    return _origin(error) == (True, False)


def _origin(error: BaseException) -> tuple[bool, bool] | None:
    """Return whether an error began in our code, and whether by a `raise` statement; None if it was not raised."""
    last = error.__traceback__
    if last is None:
        return None
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    is_raise = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return code.co_filename.startswith(PACKAGE), is_raise


@contextmanager
def as_wrong_usage(option: str) -> Iterator[None]:
    """Convert a library's ValueError or TypeError about the value of an option into WrongUsage."""
    try:
        yield
    except WrongUsage:
        raise
    except (ValueError, TypeError) as error:
        if is_bug(error):
            raise
        raise WrongUsage(f"{option}: {reason(error)}") from error


def install(extra: str) -> str:
    """Return the command that installs an extra. It needs a checkout: PyPI has another project of this name."""
    return f"pip install '.[{extra}]' in a checkout of finetune"


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return the end of an error message: the nearest valid names, or all names if none is near and they are few."""
    spellings = {other.lower(): other for other in names}
    near = [spellings[match] for match in difflib.get_close_matches(name.lower(), spellings, n=3)]
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; valid are {', '.join(names)}" if len(names) < 20 else ""


def reason(error: BaseException, place: object = "") -> str:
    """Return the message of an error in one line.

    An OSError is followed by its file name, or by `place` if it has none.
    """
    if not isinstance(error, OSError) or not error.strerror:
        return " ".join(str(error).split())
    where = error.filename or place
    return f"{error.strerror}: {where}" if where else error.strerror


class _ShownFormatter(logging.Formatter):
    """Writes control characters as escapes, since a message may hold text of an untrusted file; colors by level."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [shown(line) for line in super().format(record).split("\n")]
        text = "\n".join(lines)
        if record.levelno < logging.WARNING:
            return text
        color = "yellow" if record.levelno < logging.ERROR else "red"
        return colored(text, color, sys.stderr)


class _Stderr(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which a live bar replaces to print lines above itself.

    Forked workers write to the terminal itself: the lock of the bar may be held by a thread that they do not have.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.pid = os.getpid()

    @property
    def stream(self) -> TextIO:
        is_forked = os.getpid() != self.pid
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr) if is_forked else sys.stderr


def be_quiet() -> None:
    """Log to stderr our own messages, and only the warnings of libraries that a user can act on."""
    handler = _Stderr()
    handler.setFormatter(_ShownFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("finetune").setLevel(logging.INFO)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", module="pytorch_lightning|lightning_fabric|torchmetrics|torch"
    )


@contextmanager
def only_errors(*names: str) -> Iterator[None]:
    """Let the loggers of these names log only errors within the context."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def counted(num: int, what: str, plural: str = "") -> str:
    """Return a number with its noun, such as `1 image` or `1,200 images`."""
    return f"{num:,} {what if num == 1 else plural or what + 's'}"


def shown(name: object) -> str:
    """Return a name, such as a file name, as text on one line, with invisible characters escaped."""
    return _UNSHOWN.sub(lambda match: ascii(match[0])[1:-1], str(name))


def fault_of_names(names: Sequence[str]) -> str:
    """Return why these class names are invalid; "" if they are valid."""
    if len(names) < 2:
        return "fewer than two classes"
    if len(set(names)) < len(names):
        return "a name more than once"
    return next(
        (f"the name '{shown(name)}'" for name in names if not name or shown(name) != name), ""
    )


def why_name_is_invalid(name: str) -> str:
    """Return why a class cannot have this name; "" if it can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    return "has a line break or control character in its name" if shown(name) != name else ""


def bytes_text(num: float) -> str:
    """Return a number of bytes as `12 KB`, `81.6 MB` or `1.2 GB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num >= size:
            return f"{num / size:.1f} {unit}"
    return f"{num / 1e3:.0f} KB"
