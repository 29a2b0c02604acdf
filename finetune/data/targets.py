"""The targets of a split's images, by kind of label."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ClassIndex:
    """One class for each image.

    Attributes:
        labels: Class index of each image, (N,) int64; -1 if it is unknown.
        num_classes: Number of classes, K.
    """

    labels: np.ndarray
    num_classes: int

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> int:
        return int(self.labels[index])

    @staticmethod
    def collate(labels: Iterable[int]) -> np.ndarray:
        """Return the labels of several images as a batch, (B,) int64."""
        return np.fromiter(labels, np.int64)

    def take(self, rows: np.ndarray) -> "ClassIndex":
        """Return the targets at `rows`, in that order."""
        return ClassIndex(self.labels[rows], self.num_classes)

    def counts(self) -> np.ndarray:
        """Return the number of images per class, (K,) int64. Images of unknown class are not counted."""
        return np.bincount(self.labels[self.labels >= 0], minlength=self.num_classes)

    def strata(self) -> np.ndarray:
        """Return the stratum of each image for a stratified split, (N,) int64."""
        return self.labels

    def fingerprint(self) -> bytes:
        """Return bytes that differ if the targets differ."""
        return self.labels.tobytes()
