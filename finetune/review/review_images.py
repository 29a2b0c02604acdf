"""The images of a review."""

from pathlib import Path

from finetune.data.corrections import EXCLUDED
from finetune.data.data_set import DataSet
from finetune.data.datasets.scan import scan
from finetune.data.faults import refuse_faults
from finetune.data.listing import ScanOptions
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage

_AS_FOUND = ScanOptions()


def list_images(folder: str | Path, options: ScanOptions = _AS_FOUND) -> DataSet:
    """Return the images of a folder or a table, of all its splits.

    Args:
        folder: The folder or the table.
        options: How to read a table.

    Raises:
        ValueError: It is not a data set, or a class has a reserved name.
        OSError: The folder cannot be read.
    """
    data = scan(str(folder), options, prefix="")
    refuse_faults(data.faults, skip=True)
    if EXCLUDED in map(composed, data.class_names):
        raise WrongUsage(
            f"{folder} has a class {EXCLUDED!r}, which means an excluded image in a file of corrections: rename it"
        )
    return data
