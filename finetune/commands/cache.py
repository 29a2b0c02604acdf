"""`finetune cache`: list or remove the caches of earlier runs."""

import time
from collections.abc import Mapping
from pathlib import Path

from rich.table import Column
from rich.text import Text

from finetune.commands.plain_table import plain_table, table_console
from finetune.data.memmap import open_or_none
from finetune.system.cache_dir import FORMER, IMAGES, cache_dir, has_mark
from finetune.system.files import unfinished_matching
from finetune.system.messages import WrongUsage, bytes_text, shown

_MAX_LISTED = 5  # files, in a message
_WIDTH = 400  # of a table that is not shown on a terminal, with space for long paths


def cache(remove: str | None = None) -> None:
    """List the caches of earlier runs, or remove some. A run that uses a removed cache keeps it until its end.

    Caches hold decoded images; earlier versions also cached features. Their folder is
    that of the variable FINETUNE_CACHE, or else the user's cache folder, ~/.cache/finetune on Linux.

    Args:
        remove: Name of the cache to remove, or `all`, which leaves files that this version did not write.
    """
    folder = cache_dir()
    caches = {path.stem: path for path in sorted(folder.glob(f"*{IMAGES}"))}
    for kind in FORMER:
        # a current cache may have the same stem: the key is the whole name
        caches |= {path.name: path for path in sorted(folder.glob(f"*{kind}"))}
    if remove is None:
        print(f"{'caches' if caches else 'no caches'} in {shown(str(folder))}")
        if caches:
            _print_table(caches)
        return
    if remove != "all" and remove not in caches:
        raise WrongUsage(f"there is no cache {remove!r} in {folder}; `finetune cache` lists them")
    chosen = [caches[remove]] if remove != "all" else list(caches.values())
    unmarked = []
    if remove == "all":
        unmarked = [path.name for path in chosen if not has_mark(path)]
        chosen = [path for path in chosen if has_mark(path)]
        unfinished = [
            path for kind in (IMAGES, *FORMER) for path in unfinished_matching(folder, f"*{kind}")
        ]
        chosen += [path for path in unfinished if has_mark(path) or path.stat().st_size == 0]
    num_bytes = sum(path.stat().st_size for path in chosen)
    for path in chosen:
        path.unlink()
    print(f"removed {len(chosen)} from {folder}: {bytes_text(num_bytes)}")
    if unmarked:
        names = ", ".join(map(shown, unmarked[:_MAX_LISTED])) + (
            ", ..." if len(unmarked) > _MAX_LISTED else ""
        )
        print(
            f"left {len(unmarked)} that this version of finetune did not write: {names}; to remove one, pass its name"
        )


def _print_table(caches: Mapping[str, Path]) -> None:
    """Print the caches: what they hold, their sizes, and when they were used."""
    columns = (
        Column("name", no_wrap=True),
        Column("what", overflow="fold"),
        Column("size", justify="right", no_wrap=True),
        Column("last used", no_wrap=True),
    )
    table = plain_table(columns)
    for name, path in caches.items():
        status = path.stat()
        about = "features, of an earlier version: no run uses them"
        if not has_mark(path):
            about = "not written by this version of finetune: --remove all leaves it"
        elif path.suffix == IMAGES:
            packed = open_or_none(path)
            about = (
                f"{len(packed):,} images of {packed.about['root']}" if packed else "damaged images"
            )
        last_used = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        table.add_row(Text(name), Text(about), bytes_text(status.st_size), last_used)
    table_console(_WIDTH).print(table)
