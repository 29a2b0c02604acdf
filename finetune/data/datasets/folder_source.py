"""A folder of class folders as a source of images."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.data.datasets.class_changes import NO_CHANGES, ClassChanges
from finetune.data.datasets.folders import scan
from finetune.data.datasets.image_source import FoundImages
from finetune.data.datasets.listing import Listing, list_pictures
from finetune.data.storage import normal_path


@dataclass(frozen=True)
class FolderSource:
    """A folder of class folders, or of train, val and test that hold them.

    Attributes:
        root: The folder.
        changes: Class folders to skip, and classes to merge.
    """

    root: str
    changes: ClassChanges = NO_CHANGES

    def find(
        self, class_names: Sequence[str] | None, skip: bool = False, is_logged: bool = True
    ) -> FoundImages:
        """Return the classes and images; see `ImageSource.find`."""
        names, splits = scan(self.root, class_names, skip, is_logged, self.changes)
        return FoundImages(names, splits, folder=normal_path(self.root))

    def listing(self) -> Listing:
        """Return all images; see `list_pictures`."""
        return list_pictures(self.root)
