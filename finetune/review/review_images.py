"""The images of a review, as the data module finds them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data.corrected_samples import relative_paths
from finetune.data.corrections import EXCLUDED
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.datasets.listing import Listing, listing_of
from finetune.data.tables.table_file import is_table
from finetune.data.tables.table_rows import TableOptions
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.data.walk import SkippedFiles
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage

_AS_FOUND = TableOptions()


@dataclass(frozen=True)
class ReviewImages:
    """The images of a review, N.

    Attributes:
        listing: The images. If they have several labels, its classes are the labels.
        targets: The labels of the images, which no correction has changed.
        names: Path of each image relative to the folder of the data set, as in a file of corrections.
        index_of: The index of each image by its name in composed Unicode.
    """

    listing: Listing
    targets: Targets
    names: list[str]
    index_of: dict[str, int]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def class_names(self) -> list[str]:
        return self.listing.class_names

    @property
    def has_several(self) -> bool:
        """Whether images have several labels."""
        return isinstance(self.targets, MultiHot)

    def labels(self, i: int) -> list[int]:
        """Return the indices of the labels of an image, ascending."""
        row = self.targets.labels[i]
        return np.flatnonzero(row).tolist() if self.has_several else [int(row)]


def list_images(folder: str | Path, options: TableOptions = _AS_FOUND) -> ReviewImages:
    """Return the images of a folder or a table, of all its splits.

    Args:
        folder: The folder or the table.
        options: How to read a table.

    Raises:
        ValueError: It is not a data set, or a class has a reserved name.
        OSError: The folder cannot be read.
    """
    is_of_table = is_table(folder)
    # without fractions: the images of a data set without splits stay together
    data = ImageFolderData(
        root=options.root if is_of_table else str(folder),
        table=str(folder) if is_of_table else None,
        columns={role: list(names) for role, names in options.columns.items()},
        labels=options.labels,
        label_separator=options.separator,
        val_fraction=0.0,
        test_fraction=0.0,
        on_bad_image="skip",
    )
    if EXCLUDED in map(composed, data.class_names):
        raise WrongUsage(
            f"{folder} has a class {EXCLUDED!r}, which means an excluded image in a file of corrections: rename it"
        )
    folders = np.ones((len(data.splits), len(data.class_names)), bool)
    listing = listing_of(
        data.scanned.folder, data.splits, data.class_names, folders, SkippedFiles()
    )
    names = list(relative_paths(listing.paths, data.scanned.folder))
    labels = np.concatenate([samples.targets.labels for samples in data.splits.values()])
    targets: Targets = ClassIndex(labels, len(data.class_names))
    if data.label_kind == "several":
        targets = MultiHot(labels)
    return ReviewImages(
        listing, targets, names, {composed(name): i for i, name in enumerate(names)}
    )
