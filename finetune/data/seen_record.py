"""The record of the images that a run trains and validates on, as checkpoints hold it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from finetune.data.contents import UNKNOWN, file_digests
from finetune.data.samples import Samples
from finetune.data.targets import ClassIndex


@dataclass(frozen=True)
class Seen:
    """Pictures by name, size and content, those of training first: 20 bytes each, 2 MB of a checkpoint for 100,000.

    Attributes:
        names: `hashes` of their names (`Samples.names`), (N,) uint64.
        sizes: Bytes of each file modulo 2**31, (N,) int32; 0 where it could not be read.
        num_train: The first so many were trained on; on the others training was validated.
        digests: `file_digests` of them, (N,) uint64; None before a fit has begun, and in earlier versions' checkpoints.
    """

    names: np.ndarray
    sizes: np.ndarray
    num_train: int
    digests: np.ndarray | None = None

    def packed(self) -> dict[str, Any]:
        """Return the record as the content of a checkpoint."""
        packed = {
            "names": torch.from_numpy(self.names.view(np.int64)),
            "sizes": torch.from_numpy(self.sizes),
        }
        if self.digests is not None:
            packed["digests"] = torch.from_numpy(self.digests.view(np.int64))
        return {**packed, "num_train": self.num_train}

    def fingerprint(self, targets: ClassIndex) -> str:
        """Return a hash of names, sizes and targets of the training images: it differs if the training data differ."""
        digest = hashlib.sha256(self.names[: self.num_train].tobytes())
        digest.update(self.sizes[: self.num_train].tobytes() + targets.fingerprint())
        return digest.hexdigest()


def unpacked(seen: Mapping[str, Any]) -> Seen:
    """Return the record that `Seen.packed` made the content of a checkpoint of."""
    digests = seen["digests"].numpy().view(np.uint64) if "digests" in seen else None
    return Seen(
        seen["names"].numpy().view(np.uint64), seen["sizes"].numpy(), seen["num_train"], digests
    )


def recorded(checkpoint: Mapping[str, Any]) -> Seen | None:
    """Return the record in a checkpoint; None if it has none that can be compared with files.

    That is so in old checkpoints, and in those of Fashion-MNIST of earlier versions, whose images were no files: their
    sizes are all 0.
    """
    packed = checkpoint["finetune"].get("seen")
    if not packed or not packed["sizes"].any():
        return None
    return unpacked(packed)


def seen_by(train: Samples, val: Samples | None) -> Seen:
    """Return the record of a run with these splits.

    Args:
        train: The images to train on.
        val: The images to validate on.
    """
    splits = [train] if val is None else [train, val]
    names = np.concatenate([split.hashes() for split in splits])
    sizes = np.concatenate([file_sizes(split) for split in splits])
    return Seen(names, sizes, len(train))


def with_digests(seen: Seen, train: Samples, val: Samples | None) -> Seen:
    """Return the record of a run with these splits, with digests; this reads 12 kB of each file."""
    paths = [train.paths, [] if val is None else val.paths]
    sizes = np.split(seen.sizes, [seen.num_train])
    parts = [
        file_digests(part, np.flatnonzero(size)) for part, size in zip(paths, sizes, strict=True)
    ]
    return replace(seen, digests=np.concatenate(parts))


def joined(now: Seen, before: Seen) -> Seen:
    """Return the union of two records: all of `now`, and the images that only `before` has.

    An image that is trained on in either is one of training in the union. One whose content has changed counts as
    another image.
    """
    digests = [
        np.full(len(s.names), UNKNOWN) if s.digests is None else s.digests for s in (now, before)
    ]

    def is_in(part: slice) -> np.ndarray:
        """Return which images of `before` are among these rows of `now`."""
        has_name = np.isin(before.names, now.names[part])
        if now.digests is None:
            return has_name
        return has_name & ((digests[1] == UNKNOWN) | np.isin(digests[1], now.digests[part]))

    is_train = np.arange(len(before.names)) < before.num_train
    is_new = ~np.where(is_train, is_in(slice(now.num_train)), is_in(slice(None)))
    if not is_new.any():
        return now

    def both(own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return a column of the union, training images first."""
        train = own[: now.num_train], other[is_new & is_train]
        rest = own[now.num_train :], other[is_new & ~is_train]
        return np.concatenate([*train, *rest])

    num_train = now.num_train + int(np.count_nonzero(is_new & is_train))
    union = Seen(both(now.names, before.names), both(now.sizes, before.sizes), num_train)
    has_digests = now.digests is not None or before.digests is not None
    return replace(union, digests=both(digests[0], digests[1])) if has_digests else union


def file_sizes(samples: Samples) -> np.ndarray:
    """Return the bytes of each file modulo 2**31, (N,) int32; 0 if it cannot be found."""
    return (samples.known_stats().sizes.clip(0) % 2**31).astype(np.int32)
