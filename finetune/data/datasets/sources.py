"""A folder of class folders as a source of images, and the choice between a folder and a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.data.datasets.class_changes import NO_CHANGES, ClassChanges
from finetune.data.datasets.folders import scan
from finetune.data.datasets.image_source import FoundImages, ImageSource
from finetune.data.datasets.listing import Listing, list_images
from finetune.data.datasets.table_source import TableSource
from finetune.data.local_folders import local_folder
from finetune.data.storage import normal_path
from finetune.data.tables.table_rows import TableOptions
from finetune.system.messages import WrongUsage


@dataclass(frozen=True)
class FolderSource:
    """A folder of class folders, or of train, val and test that hold them.

    Attributes:
        root: The folder, or a place that `local_folder` takes.
        changes: Class folders to skip, and classes to merge.
    """

    root: str
    changes: ClassChanges = NO_CHANGES

    def find(
        self, class_names: Sequence[str] | None, skip: bool = False, is_logged: bool = True
    ) -> FoundImages:
        """Return the classes and images; see `ImageSource.find`."""
        folder = local_folder(self.root)
        names, splits = scan(folder, class_names, skip, is_logged, self.changes)
        return FoundImages(names, splits, folder=normal_path(folder))

    def listing(self) -> Listing:
        """Return all images; see `list_images`."""
        return list_images(local_folder(self.root))


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
        WrongUsage: The name of the folder is empty, or options for tables would have no effect.
    """
    if table is not None:
        return TableSource(Path(table), options)
    if not folder:
        raise WrongUsage("the name of the folder of images is empty: . is the working directory")
    is_set = {
        "columns": bool(options.columns),
        "labels": options.labels == "several",  # checkpoints of folders hold single
        "label_separator": options.separator is not None,
    }
    for name in is_set:
        if is_set[name]:
            raise WrongUsage(f"--{group}{name} is for tables, and {folder} is a folder")
    return FolderSource(folder, ClassChanges(options.exclude, options.merge))
