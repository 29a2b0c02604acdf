"""What a fit can know of its files in a moment: which can't be pictures, and which lie in two splits alike.

`finetune check` looks closer. This asks for all sizes, reads the first bytes of so many files, and 4 kB of those that
have their size in common with one of another split: 2.5 seconds of the processor for 100,000 files, of which each
epoch decodes all, in hundreds of them.
"""

import os
import stat
from collections.abc import Mapping

import numpy as np

from finetune.data.checking.exact_duplicates import equal_files
from finetune.data.decode import READERS
from finetune.data.splits import Split
from finetune.system.messages import shown

_NUM_OPENED = 20_000  # about a second; of more files some are looked at, evenly spaced


def first_look(splits: Mapping[str, Split], root: str | None) -> str:
    """Return in a line what is wrong at first sight, "" if nothing is.

    Args:
        splits: Of a data module; pictures that are no files are left out.
        root: The folder of the data set, for the advice.
    """
    paths = [path for split in splits.values() for path in split.paths]
    split_of = np.repeat(np.arange(len(splits)), [len(split.paths) for split in splits.values()])
    sizes = np.array([_size(path) for path in paths], np.int64)
    files = np.flatnonzero(sizes >= 0)
    looked_at = files[np.linspace(0, len(files) - 1, min(_NUM_OPENED, len(files))).astype(int)]
    broken = np.union1d(files[sizes[files] == 0], [i for i in looked_at.tolist() if not _is_picture(paths[i])])
    sizes[broken.astype(int)] = -1  # empty ones, and error pages, are no copies of each other
    leaks = equal_files(paths, sizes, split_of)
    found = []
    if leaks:
        pair = " and ".join(shown(paths[i]) for i in (leaks[0][0], leaks[0][-1]))
        found.append(f"{sum(map(len, leaks))} lie in two splits alike, {pair} for one")
    if len(broken):
        found.append(f"{len(broken)} can't be read, {shown(paths[int(broken[0])])} for one")
    return f"of the pictures {', and '.join(found)} (finetune check {shown(root)} says which)" if found else ""


def _size(path: str) -> int:
    """Return a file's bytes; 0 for a link to nothing, and less where there is no regular file of that name."""
    try:
        status = os.stat(path)
    except OSError:
        return 0 if os.path.islink(path) else -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def _is_picture(path: str) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(16).startswith(tuple(READERS))
    except OSError:
        return False
