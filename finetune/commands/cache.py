"""`finetune cache`: list or remove the caches of decoded images."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.table import Column
from rich.text import Text

from finetune.commands.plain_table import plain_table, table_console
from finetune.data.memmap import open_or_none
from finetune.system.cache_dir import IMAGES, cache_dir, has_mark
from finetune.system.files import unfinished_matching
from finetune.system.messages import bytes_text, shown

_WIDTH = 400  # of a table that is not shown on a terminal, with space for long paths


def cache(remove: Literal["all"] | None = None) -> None:
    """List the caches of decoded images, or remove all. A run that uses a removed cache keeps it until its end.

    Their folder is that of the variable FINETUNE_CACHE, or else the user's cache folder, ~/.cache/finetune on Linux.

    Args:
        remove: `all` removes the caches; files that finetune did not write stay.
    """
    folder = cache_dir()
    caches = [path for path in sorted(folder.glob(f"*{IMAGES}")) if has_mark(path)]
    if remove is None:
        print(f"{'caches' if caches else 'no caches'} in {shown(str(folder))}")
        if caches:
            _print_table(caches)
        return
    unfinished = unfinished_matching(folder, f"*{IMAGES}")
    chosen = [
        *caches,
        *(path for path in unfinished if has_mark(path) or path.stat().st_size == 0),
    ]
    num_bytes = sum(path.stat().st_size for path in chosen)
    for path in chosen:
        path.unlink()
    print(f"removed {len(chosen)} from {shown(str(folder))}: {bytes_text(num_bytes)}")


def _print_table(caches: Sequence[Path]) -> None:
    """Print the caches: what they hold, their sizes, and when they were used."""
    columns = (
        Column("what", overflow="fold"),
        Column("size", justify="right", no_wrap=True),
        Column("last used", no_wrap=True),
    )
    table = plain_table(columns)
    for path in caches:
        status = path.stat()
        packed = open_or_none(path)
        about = f"{len(packed):,} images of {packed.about['root']}" if packed else "damaged images"
        last_used = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        table.add_row(Text(about), bytes_text(status.st_size), last_used)
    table_console(_WIDTH).print(table)
