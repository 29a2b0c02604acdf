"""`finetune cache`: list or remove the caches of decoded images, and the copies of images in buckets and archives."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Column
from rich.text import Text

from finetune.commands.plain_table import plain_table, table_console
from finetune.data.memmap import open_or_none
from finetune.settings.all_commands import CacheSettings
from finetune.system.cache_dir import COPIES, COPIES_MARK, IMAGES, cache_dir, has_mark
from finetune.system.files import unfinished_matching
from finetune.system.messages import bytes_text, shown
from finetune.system.process_folder import remove_ended

_WIDTH = 400  # of a table that is not shown on a terminal, with space for long paths


def cache(options: CacheSettings) -> None:
    """List the caches of decoded images and the copies of images in object storage and in archives, or remove all.

    A run that uses a removed cache keeps it until its end, but ends if its copies are removed.

    Their folder is that of the variable FINETUNE_CACHE, or else the user's cache folder, ~/.cache/finetune on Linux.
    """
    folder = cache_dir()
    caches = [path for path in sorted(folder.glob(f"*{IMAGES}")) if has_mark(path)]
    copies = sorted(mark.parent for mark in (folder / COPIES).glob(f"*/{COPIES_MARK}"))
    if options.remove is None:
        print(f"{'caches' if caches or copies else 'no caches'} in {shown(str(folder))}")
        if caches or copies:
            _print_table(caches, copies)
        return
    unfinished = unfinished_matching(folder, f"*{IMAGES}")
    chosen = [
        *caches,
        *(path for path in unfinished if has_mark(path) or path.stat().st_size == 0),
    ]
    num_bytes = sum(path.stat().st_size for path in chosen) + sum(map(_num_bytes, copies))
    for path in chosen:
        path.unlink()
    for path in copies:
        shutil.rmtree(path)
    remove_ended(folder / COPIES)
    print(f"removed {len(chosen) + len(copies)} from {shown(str(folder))}: {bytes_text(num_bytes)}")


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _print_table(caches: Sequence[Path], copies: Sequence[Path]) -> None:
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
    for folder in copies:
        table.add_row(Text(f"copies of {folder.name}"), bytes_text(_num_bytes(folder)), "")
    table_console(_WIDTH).print(table)
