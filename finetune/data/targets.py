"""The targets of a split's images, by kind of label: one class per image, or several labels per image."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# Shapes: N images of a split, B images of a batch, K classes.


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

    def weighted_counts(self, weights: np.ndarray) -> np.ndarray:
        """Return the sum of the weights (N,) of the images of each class, (K,) float64."""
        is_known = self.labels >= 0
        return np.bincount(self.labels[is_known], weights[is_known], minlength=self.num_classes)

    def strata(self) -> np.ndarray:
        """Return the stratum of each image for a stratified split, (N,) int64."""
        return self.labels

    def fingerprint(self) -> bytes:
        """Return bytes that differ if the targets differ."""
        return self.labels.tobytes()


@dataclass(frozen=True)
class MultiHot:
    """Any number of labels for each image, also none.

    Attributes:
        labels: Whether each image has each label, (N, K) uint8, 0 or 1.
    """

    labels: np.ndarray

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        return self.labels.shape[1]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the labels of an image, (K,) uint8."""
        return self.labels[index]

    def collate(self, labels: Iterable[np.ndarray]) -> np.ndarray:
        """Return the labels of several images as a batch, (B, K) float32."""
        rows = list(labels)
        return np.array(rows, np.float32).reshape(len(rows), self.num_classes)

    def take(self, rows: np.ndarray) -> "MultiHot":
        """Return the targets at `rows`, in that order."""
        return MultiHot(self.labels[rows])

    def counts(self) -> np.ndarray:
        """Return the number of images that have each label, (K,) int64. An image counts for each of its labels."""
        return self.labels.sum(axis=0, dtype=np.int64)

    def weighted_counts(self, weights: np.ndarray) -> np.ndarray:
        """Return the sum of the weights (N,) of the images that have each label, (K,) float64."""
        return weights @ self.labels

    def strata(self) -> np.ndarray:
        """Return the stratum of each image for a stratified split, (N,) int64.

        It is the rarest label of the image, so that rare labels get their share of each split. Of equally rare labels
        it is the first. Images without labels are in the stratum K.
        """
        counts = self.counts()
        order = np.argsort(counts, kind="stable")  # from the rarest label
        has_label = self.labels[:, order].astype(bool)
        rarest = order[has_label.argmax(axis=1)]
        return np.where(has_label.any(axis=1), rarest, self.num_classes)

    def fingerprint(self) -> bytes:
        """Return bytes that differ if the targets differ."""
        return np.ascontiguousarray(self.labels, np.uint8).tobytes()


Targets = ClassIndex | MultiHot
