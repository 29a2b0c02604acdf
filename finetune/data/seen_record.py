"""The record of a run's training and validation images, which is stored in checkpoints."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from finetune.data.contents import UNKNOWN, file_digests
from finetune.data.samples import Samples


@dataclass(frozen=True)
class SeenRecord:
    """Images by name, size and content; training images first.

    An image takes 20 bytes: 2 MB of a checkpoint for 100,000 images.

    Attributes:
        names: `hashes` of the names (`Samples.names`), (N,) uint64.
        sizes: Bytes of each file modulo 2**31, (N,) int32; 0 if it could not be read.
        num_train: Number of training images. The other images are validation images.
        digests: `file_digests` of the files, (N,) uint64. None before a fit.
    """

    names: np.ndarray
    sizes: np.ndarray
    num_train: int
    digests: np.ndarray | None = None

    def pack(self) -> dict[str, Any]:
        """Return the record as values that a checkpoint may hold."""
        packed = {
            "names": torch.from_numpy(self.names.view(np.int64)),
            "sizes": torch.from_numpy(self.sizes),
        }
        if self.digests is not None:
            packed["digests"] = torch.from_numpy(self.digests.view(np.int64))
        return {**packed, "num_train": self.num_train}


def unpack_record(seen: Mapping[str, Any]) -> SeenRecord:
    """Return the record from the values that `SeenRecord.pack` returned."""
    return SeenRecord(
        seen["names"].numpy().view(np.uint64),
        seen["sizes"].numpy(),
        seen["num_train"],
        seen["digests"].numpy().view(np.uint64),
    )


def read_record(checkpoint: Mapping[str, Any]) -> SeenRecord | None:
    """Return the record in a checkpoint; None if there is none that can be compared with files.

    Images that are not files have the size 0.
    """
    packed = checkpoint["finetune"].get("seen")
    if not packed or not packed["sizes"].any():
        return None
    return unpack_record(packed)


def build_record(train: Samples, val: Samples | None) -> SeenRecord:
    """Return the record of a run with these splits.

    Args:
        train: Training images.
        val: Validation images, if any.
    """
    splits = [train] if val is None else [train, val]
    names = np.concatenate([split.hashes() for split in splits])
    sizes = np.concatenate([file_sizes(split) for split in splits])
    return SeenRecord(names, sizes, len(train))


def fingerprint(seen: SeenRecord, train: Samples, val: Samples | None) -> str:
    """Return a hash of all that decides the result of a fit: names, sizes, targets, weights and groups of the images.

    Args:
        seen: The record of these splits.
        train: Training images.
        val: Validation images, if any.
    """
    digest = hashlib.sha256(f"{seen.num_train}".encode() + seen.names.tobytes())
    digest.update(seen.sizes.tobytes())
    for samples in (train, val):
        if samples is None:
            continue
        digest.update(samples.targets.fingerprint())
        for column in (samples.weights, samples.groups):
            digest.update(b"" if column is None else column.tobytes())
    return digest.hexdigest()


def add_digests(seen: SeenRecord, train: Samples, val: Samples | None) -> SeenRecord:
    """Return a record with the digests of these splits. This reads 12 kB of each file."""
    paths = [train.paths, [] if val is None else val.paths]
    sizes = np.split(seen.sizes, [seen.num_train])
    parts = [
        file_digests(part, np.flatnonzero(size)) for part, size in zip(paths, sizes, strict=True)
    ]
    return replace(seen, digests=np.concatenate(parts))


def merge_records(now: SeenRecord, before: SeenRecord) -> SeenRecord:
    """Return the union of two records: all images of `now`, and those that only `before` has.

    A training image of either record is a training image of the union. An image with changed content counts as another
    image.
    """
    digests = [
        np.full(len(s.names), UNKNOWN) if s.digests is None else s.digests for s in (now, before)
    ]

    def is_in(part: slice) -> np.ndarray:
        """Return which images of `before` are among the rows `part` of `now`."""
        has_name = np.isin(before.names, now.names[part])
        if now.digests is None:
            return has_name
        return has_name & ((digests[1] == UNKNOWN) | np.isin(digests[1], now.digests[part]))

    is_train = np.arange(len(before.names)) < before.num_train
    is_new = ~np.where(is_train, is_in(slice(now.num_train)), is_in(slice(None)))
    if not is_new.any():
        return now

    def merge_column(own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return a column of the union, training images first."""
        train = own[: now.num_train], other[is_new & is_train]
        rest = own[now.num_train :], other[is_new & ~is_train]
        return np.concatenate([*train, *rest])

    num_train = now.num_train + int(np.count_nonzero(is_new & is_train))
    union = SeenRecord(
        merge_column(now.names, before.names), merge_column(now.sizes, before.sizes), num_train
    )
    has_digests = now.digests is not None or before.digests is not None
    return replace(union, digests=merge_column(digests[0], digests[1])) if has_digests else union


def file_sizes(samples: Samples) -> np.ndarray:
    """Return the size of each file in bytes modulo 2**31, (N,) int32; 0 if the file does not exist."""
    return (samples.load_stats().sizes.clip(0) % 2**31).astype(np.int32)
