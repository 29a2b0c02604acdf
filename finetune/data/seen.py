"""Exclude a checkpoint's training images from its evaluation, by the record in the checkpoint.

An image is known by its content (`file_facts`), in whatever folder and under whatever name. The images of a place that
the run was not trained on are evaluated. The images that pretrained weights were trained on are not recorded.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.data.samples import Samples
from finetune.data.seen_record import SeenRecord, read_record
from finetune.system.messages import counted, shown

log = logging.getLogger(__name__)


class AllSeenError(ValueError):
    """A split of which the checkpoint has seen all images."""


def continue_record(data: Any, checkpoint: Mapping[str, Any], is_logged: bool = True) -> None:
    """Add the training images of a checkpoint to the record of the fit that continues from it.

    Args:
        data: The data module of the fit, before the fit begins.
        checkpoint: The checkpoint.
        is_logged: Whether this process warns if the images have changed.
    """
    record = read_record(checkpoint)
    if not record and is_logged:
        log.warning("the checkpoint has no record of its training images: not checked")
    elif record and is_logged and checkpoint["finetune"]["data_fingerprint"] != data.fingerprint:
        log.warning("the images have changed since this run began: its result will differ")
    if record:
        data.seen_before = record


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
