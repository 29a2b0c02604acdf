"""The choice of the source of images: a table or a folder."""

from pathlib import Path

from finetune.data.datasets.class_changes import ClassChanges
from finetune.data.datasets.folder_source import FolderSource
from finetune.data.datasets.image_source import ImageSource
from finetune.data.datasets.table_source import TableSource
from finetune.data.tables.table_rows import TableOptions
from finetune.system.messages import WrongUsage


def choose_source(
    folder: str, table: str | None, options: TableOptions, group: str = "data."
) -> ImageSource:
    """Return a table as the source of images, or a folder if there is no table. Nothing is read.

    Args:
        folder: The folder; without effect if there is a table.
        table: The table, or None.
        options: How to read a table. For a folder, only its `exclude` and `merge` are valid.
        group: The prefix of the options, for a message.

    Raises:
        WrongUsage: There is no table, and options for tables would have no effect.
    """
    if table is not None:
        return TableSource(Path(table), options)
    is_set = {
        "columns": bool(options.columns),
        "labels": options.labels == "several",  # checkpoints of folders hold single
        "label_separator": options.separator is not None,
    }
    for name in is_set:
        if is_set[name]:
            raise WrongUsage(f"--{group}{name} is for tables, and {folder} is a folder")
    return FolderSource(folder, ClassChanges(options.exclude, options.merge))
