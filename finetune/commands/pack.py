"""`finetune pack`: copy many small images into a few large files."""

import math
import os
from contextlib import ExitStack

from finetune.data.addresses import is_address, real_place
from finetune.data.pack_place import INDEX
from finetune.data.packing import Target, find_source, pack_images
from finetune.data.storage import normal_path
from finetune.data.tables.table_columns import parse_columns
from finetune.data.tables.table_file import check_supported, is_table
from finetune.data.tables.table_rows import TableOptions
from finetune.system.messages import WrongUsage, counted

_MB = 10**6
_LARGEST_MB = 100_000


def pack(
    folder: str,
    output: str,
    shard_mb: float = 256,
    root: str | None = None,
    columns: str | None = None,
) -> None:
    """Copy many small images into a few large files, for slow disks and object storage.

    The images are not decoded: `fit` handles broken ones as it does in the folder that was packed. A fit on the copy
    ends in the same weights.

    Args:
        folder: The images, as `fit` takes them: class folders, or train, val and test with class folders. Or a table.
        output: The folder to create, local or an address such as s3://BUCKET/FOLDER. It must be new or empty.
        shard_mb: Size of a file of images in 10^6 bytes, at most, unless one image is larger.
        root: Folder that paths in a table are relative to.
        columns: Columns of a table whose names are not the usual ones, such as path:photo,label:breed.
    """
    if not (0 < shard_mb <= _LARGEST_MB):  # NaN is refused, too
        raise WrongUsage(f"--shard_mb must be more than 0, up to {_LARGEST_MB:,}, got {shard_mb}")
    options = TableOptions(root=root, columns=parse_columns(columns))
    table = folder if is_table(folder) else None
    if table is None:
        check_supported(folder)
        if root is not None:
            raise WrongUsage(f"--root is for tables, and {folder} is a folder")
    if not output:
        raise WrongUsage("the name of OUT is empty: name a new folder")
    out = normal_path(output)
    if table is None and folder and _is_inside(out, folder):
        raise WrongUsage(f"{output} is in {folder}: name a folder outside of it")
    source = find_source(folder, table, options)
    with ExitStack() as stack:
        target = Target(out, stack)
        num_images, num_shards = pack_images(source, target, math.ceil(shard_mb * _MB))
    print(f"packed {counted(num_images, 'image')} into {counted(num_shards, 'shard')} in {out}")
    if table is not None and is_address(out):
        print(f"copy {out}/{INDEX}, then: finetune fit {INDEX} --data.root {out}")
    else:
        print(f"finetune fit {out}")


def _is_inside(path: str, folder: str) -> bool:
    top = os.path.join(real_place(folder), "")
    return os.path.join(real_place(path), "").startswith(top)
