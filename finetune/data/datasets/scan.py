"""Find the images of a place: a folder or a table."""

from collections.abc import Sequence
from pathlib import Path

from finetune.data.data_set import DataSet
from finetune.data.datasets.folders import list_folder
from finetune.data.listing import ScanOptions, data_set_of
from finetune.data.tables.table_file import is_table
from finetune.data.tables.table_rows import list_table
from finetune.system.messages import WrongUsage

_AS_FOUND = ScanOptions()


def scan(
    place: str,
    options: ScanOptions = _AS_FOUND,
    class_names: Sequence[str] | None = None,
    prefix: str = "data.",
) -> DataSet:
    """Find the images of a folder or a table. A fault of the data is in the result, and is not an error.

    Args:
        place: The folder or the table.
        options: How to read it.
        class_names: The classes in order, for example of a checkpoint; None for those of the training images.
        prefix: That of the options, for a message.

    Raises:
        OSError: The place cannot be read.
        WrongUsage: The name of the folder is empty, or options would have no effect.
        ValueError: The place is not a data set.
    """
    if not place:
        raise WrongUsage("the name of the folder of images is empty: . is the working directory")
    if is_table(place):
        listing = list_table(Path(place), options)
    else:
        is_set = {
            "columns": bool(options.columns),
            "labels": options.labels == "several",  # checkpoints of folders hold single
            "label_separator": options.separator is not None,
            "root": options.root is not None,
        }
        for name in is_set:
            if is_set[name]:
                raise WrongUsage(f"--{prefix}{name} is for tables, and {place} is a folder")
        listing = list_folder(place, options)
    if class_names is None:
        options.check_names(listing.existing)
    return data_set_of(listing, class_names)
