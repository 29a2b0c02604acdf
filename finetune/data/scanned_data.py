"""The images of a data module: split and corrected, and what is wrong with them."""

from dataclasses import dataclass

from finetune.data.corrected_samples import AppliedCorrections
from finetune.data.samples import Samples
from finetune.data.seen_record import SeenRecord
from finetune.models.heads import LabelKind


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
        classes_without_images: Classes without training images.
        fold_fault: What is wrong with the folds of a cross-validation; "" for nothing.
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
    fold_fault: str = ""
    has_only_zero_weights: bool = False
