"""The interface of a source of images, by which a data module reads a folder or a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from finetune.data.datasets.listing import Listing
from finetune.data.samples import Samples
from finetune.models.heads import LabelKind


@dataclass(frozen=True)
class FoundImages:
    """The images of a data set.

    Attributes:
        class_names: The classes, in the order of their indices.
        splits: The images by split: `all` if they have none, or some of `train`, `val` and `test`. They are sorted.
        label_kind: Whether an image has one label or several.
        remark: How the labels were found, for a log line; "" for class folders.
        folder: Folder that the paths of the images are relative to, or that of the class folders.
        skipped: Lines for skipped.txt: the rows that were skipped, and why.
    """

    class_names: list[str]
    splits: dict[str, Samples]
    label_kind: LabelKind = "single"
    remark: str = ""
    folder: str = ""
    skipped: tuple[str, ...] = ()


class ImageSource(Protocol):
    """A source of labelled images. Creating one reads no files."""

    def find(
        self, class_names: Sequence[str] | None, skip: bool = False, is_logged: bool = True
    ) -> FoundImages:
        """Return the classes and images.

        Args:
            class_names: The classes in order, for example of a checkpoint; None for those of the training images.
            skip: Skip files, folders and rows that cannot be read.
            is_logged: Log what was skipped.

        Raises:
            OSError: A file or folder cannot be read.
            ValueError: The data set has a fault.
        """

    def listing(self) -> Listing:
        """Return all images for `finetune check`, also of a data set that `find` refuses."""
