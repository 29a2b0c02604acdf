"""The images that a run has seen, by their content: the record of them in a checkpoint, and their exclusion from tests.

An image is known in whatever folder and under whatever name (`file_facts`). The images of a place that the run was not
trained on are evaluated. The images that pretrained weights were trained on are not recorded.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from finetune.data.file_facts import UNKNOWN
from finetune.data.samples import Samples
from finetune.system.messages import counted, shown

log = logging.getLogger(__name__)


class AllSeenError(ValueError):
    """A split of which the checkpoint has seen all images."""


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


def continue_record(data: Any, checkpoint: Mapping[str, Any], is_logged: bool = True) -> None:
    """Add the training images of a checkpoint to the record of the fit that continues from it.

    Args:
        data: The data module of the fit, before the fit begins.
        checkpoint: The checkpoint.
        is_logged: Whether this process warns if the images have changed.
    """
    record = read_record(checkpoint)
    if record is not None:
        data.seen_before = record
    if is_logged and record is None:
        log.warning("the checkpoint has no record of its training images: not checked")
    elif is_logged and checkpoint["finetune"]["data_fingerprint"] != data.fingerprint:
        log.warning("the images have changed since this run began: its result will differ")


def exclude_seen(
    data: Any, split: str, checkpoint: Mapping[str, Any], is_logged: bool = True
) -> None:
    """Keep the images of a split that the checkpoint was not trained on; for `test` also not validated on.

    Of a place without this split all images may be evaluated, except during a fit, which has drawn its own. If such a
    place has validation images of the checkpoint, `val` is these.

    Args:
        data: The data module; its split changes.
        split: `val` or `test`.
        checkpoint: The checkpoint.
        is_logged: Whether this process logs which images are evaluated.

    Raises:
        AllSeenError: The checkpoint was trained on all images.
    """
    record = read_record(checkpoint)
    if record is not None and not data.is_fitted:
        data.use_all_images(split)
    if split not in data.splits:
        return
    origin = data.scanned.origin(split)
    if record is not None and _keep_unseen(data, split, record, is_logged) and origin == "all":
        origin = "not trained on"
    if is_logged and not data.is_fitted:
        images = counted(len(data.splits[split]), f"{split} image")
        log.info("%s of %s (%s)", images, data.root, origin)
        if record is None:
            log.warning(
                "the checkpoint has no record of its training images: they are not excluded"
            )


def _keep_unseen(data: Any, split: str, record: SeenRecord, is_logged: bool) -> bool:
    """Exclude the images of a split that the checkpoint has seen. Return whether there are any."""
    samples: Samples = data.splits[split]
    digests = samples.look().digests
    is_seen = np.isin(digests, record.train)
    is_validated = np.isin(digests, record.val)
    if split == "test":
        is_seen |= is_validated
    # without splits of its own a group may have images on both sides of a drawn split
    if samples.groups is not None and (samples.is_drawn or not data.scanned.has_splits):
        is_seen |= np.isin(samples.groups, samples.groups[is_seen])
    kept = ~is_seen
    why = "which the checkpoint was trained on"
    is_whole = not samples.is_drawn and not data.scanned.has_splits
    if split == "val" and is_whole and (kept & is_validated).any():
        kept &= is_validated
        why = "which are not those that the checkpoint was validated on"
    if kept.all():
        return False
    first = shown(samples.paths[int(np.argmin(kept))])
    count = f"{np.count_nonzero(~kept)} of the {len(samples)} {split} images of {data.root}"
    if not kept.any():
        raise AllSeenError(
            f"this checkpoint has seen {count} in training, such as {first}. Pass images that it was not trained on"
        )
    if is_logged:
        log.info("skipped %s, %s, such as %s", count, why, first)
    splits = data.splits | {split: samples.take(np.flatnonzero(kept))}
    data.scanned = replace(data.scanned, splits=splits)
    return True
