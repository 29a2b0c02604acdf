"""The record of a run's training and validation images, by content. It is stored in checkpoints."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.data.file_facts import UNKNOWN
from finetune.data.samples import Samples
from finetune.system.messages import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeenRecord:
    """The content digests of images, sorted. An image takes 8 bytes: 0.8 MB of a checkpoint for 100,000 images.

    Attributes:
        train: The digests of the training images, as in `FileFacts`, (N,) uint64.
        val: Those of the validation images, (M,) uint64.
    """

    train: np.ndarray
    val: np.ndarray

    def __or__(self, other: "SeenRecord") -> "SeenRecord":
        """Return the record of the images of two runs."""
        return SeenRecord(np.union1d(self.train, other.train), np.union1d(self.val, other.val))

    def after(self, before: "SeenRecord") -> "SeenRecord":
        """Return the record of a run that continues. Warn if images have another content than when it began."""
        new = np.setdiff1d(np.union1d(self.train, self.val), np.union1d(before.train, before.val))
        if len(new):
            has = counted(len(new), "image has", "images have")
            text = "another content than when this run began: its result will differ"
            log.warning("%s %s", has, text)
        return self | before

    def pack(self) -> dict[str, Any]:
        """Return the record as values that a checkpoint may hold."""
        return {
            "train": torch.from_numpy(self.train.view(np.int64)),
            "val": torch.from_numpy(self.val.view(np.int64)),
        }


def read_record(checkpoint: Mapping[str, Any]) -> SeenRecord | None:
    """Return the record in a checkpoint; None if there is none, or if its images were no files."""
    packed = checkpoint["finetune"].get("seen")
    if not packed or not len(packed["train"]):
        return None
    return SeenRecord(*(packed[name].numpy().view(np.uint64) for name in ("train", "val")))


def build_record(train: Samples, val: Samples | None) -> SeenRecord:
    """Return the record of a run with these splits. Files are read, unless they were."""
    digests = [part.look().digests for part in (train, val) if part is not None]
    known = [np.unique(part[part != UNKNOWN]) for part in digests]
    return SeenRecord(known[0], known[1] if val is not None else known[0][:0])


def fingerprint(train: Samples, val: Samples | None) -> str:
    """Return a hash of all that decides the result of a fit: names, sizes, targets, weights and groups of the images.

    Args:
        train: Training images.
        val: Validation images, if any.
    """
    parts = [train] if val is None else [train, val]
    digest = hashlib.sha256(f"{len(train)}".encode())
    for part in parts:
        digest.update(part.hashes().tobytes())
    for part in parts:
        digest.update((part.load_stats().sizes.clip(0) % 2**31).astype(np.int32).tobytes())
    for part in parts:
        digest.update(part.targets.fingerprint())
        for column in (part.weights, part.groups):
            digest.update(b"" if column is None else column.tobytes())
    return digest.hexdigest()
