"""The images of a data module: split and corrected, and what is wrong with them."""

from dataclasses import dataclass, field

from finetune.data.corrected_samples import AppliedCorrections
from finetune.data.samples import Samples
from finetune.data.seen_record import SeenRecord
from finetune.models.heads import LabelKind


@dataclass(frozen=True)
class FoldFaults:
    """What is wrong with the folds of a cross-validation.

    Attributes:
        rare: Indices of the classes that at most one fold tests, so that its network could not learn them.
        empty: The first fold that tests no image; None if there is none.
        untrained: The first fold without training images of another class, and the index of that class; None if there
            is none.
        num_units: Number of groups or images of each class, if there are rare ones.
        num_all_units: Number of groups or images that are split into folds.
    """

    rare: frozenset[int] = frozenset()
    empty: int | None = None
    untrained: tuple[int, int] | None = None
    num_units: tuple[int, ...] = ()
    num_all_units: int = 0


@dataclass(frozen=True)
class ScannedData:
    """The images of a data module and their classes.

    Attributes:
        class_names: The classes, in the order of their indices.
        splits: The images of each split, some of `train`, `val`, `test` and `predict`.
        label_kind: Whether each image has exactly one class, or several labels or none.
        folder: Folder that the paths of the images are relative to; "" if there is none.
        seen: The record of the training and validation images; None without training images.
        fingerprint: A hash of the training and validation images and their targets; "" without training images.
        remark: How the labels were found, for a log line.
        skipped_rows: Rows of a table that were skipped, and why.
        corrections: What the file of corrections changed; None without one.
        classes_without_images: Classes without training images, or in too few folds.
        fold_faults: What is wrong with the folds of a cross-validation.
        has_only_zero_weights: Whether all training images have the weight 0.
    """

    class_names: list[str]
    splits: dict[str, Samples]
    label_kind: LabelKind = "single"
    folder: str = ""
    seen: SeenRecord | None = None
    fingerprint: str = ""
    remark: str = ""
    skipped_rows: tuple[str, ...] = ()
    corrections: AppliedCorrections | None = None
    classes_without_images: tuple[str, ...] = ()
    fold_faults: FoldFaults = field(default_factory=FoldFaults)
    has_only_zero_weights: bool = False
