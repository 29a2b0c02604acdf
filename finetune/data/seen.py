"""Exclude a checkpoint's training images from its evaluation, by the record in the checkpoint.

Images are recognised by name and, in any folder, by content (`contents`). The images that pretrained weights
were trained on are not recorded.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from finetune.data.contents import UNKNOWN, file_digests
from finetune.data.data_place import place_of
from finetune.data.files import is_same_place
from finetune.data.samples import Samples
from finetune.data.seen_record import SeenRecord, file_sizes, read_record
from finetune.data.splits import SPLIT_NAMES, hashes
from finetune.system.messages import counted, shown

log = logging.getLogger(__name__)

_DRAWN_BY = ("split_seed", "val_fraction", "test_fraction", "group_by", "num_folds", "fold")
_MOST_COMPARED = 1000  # images of a folder, to decide whether it is the training folder


def describe(data: Any, split: str) -> str:
    """Return a text with the number of images of a split of a data module and their source."""
    images = counted(len(data.splits[split]), f"{split} image")
    return f"{images} of {data.root} ({data.scanned.origin(split)})"


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
    """Exclude a checkpoint's training images from a split, before the split is evaluated.

    A folder without splits is evaluated completely if the checkpoint was not trained on it.

    Args:
        data: The data module; its split changes.
        split: `val` or `test`.
        checkpoint: The checkpoint.
        is_logged: Whether this process logs which images are evaluated.

    Raises:
        ValueError: The split holds training images, and they cannot be excluded.
    """
    if not exclude_seen_of_same_folder(data, split, checkpoint, is_logged):
        data.use_all_images(split)
        exclude_copies(data, split, checkpoint, is_logged)
    if is_logged and split in data.splits and not data.is_fitted:
        log.info("%s", describe(data, split))
        if read_record(checkpoint) is None:
            log.warning(
                "the checkpoint has no record of its training images: they are not excluded"
            )


def exclude_seen_of_same_folder(
    data: Any, split: str, checkpoint: Mapping[str, Any], is_logged: bool = True
) -> bool:
    """Exclude training images from a split, if this is the folder that the checkpoint was trained on.

    Returns:
        Whether this is that folder.

    Raises:
        ValueError: The split holds training images, and a change of the folder cannot be the reason: all images of the
            split were trained on, the split has its own folder, or training split the folder by other settings.
    """
    record = read_record(checkpoint)
    if not _is_trained_on(data, checkpoint, record, is_logged):
        return False
    if record and split in data.splits:
        _exclude_seen_rows(data, split, checkpoint, record, is_logged)
    return True


def _is_trained_on(
    data: Any, checkpoint: Mapping[str, Any], record: SeenRecord | None, is_logged: bool
) -> bool:
    """Return whether this is the folder that the checkpoint was trained on. It may have been moved or renamed.

    It is recognised by its path, if it also holds half of the recorded images. The same path alone is not enough,
    because another disk may be mounted there. Otherwise it is recognised by its images.
    """
    root = place_of(checkpoint.get("datamodule_hyper_parameters", {})) or data.default_root
    is_same_path = bool(root) and is_same_place(root, data.root)
    if record is None or (is_same_path and _holds_half_of_record(data, record)):
        return is_same_path
    is_same = _holds_recorded_images(data, record)
    if is_same_path and not is_same and is_logged:
        log.warning(
            "%s has few of the images that this checkpoint was trained on: taken for a new data set",
            data.root,
        )
    return is_same


def _holds_half_of_record(data: Any, record: SeenRecord) -> bool:
    """Return whether a folder holds at least half of the recorded images by name, or by size if they were renamed."""
    # also by the names that images had before they were moved into the folder of a split
    names = [
        hashed
        for split in data.splits.values()
        for hashed in (split.hashes(), _hashes_without_split(split))
    ]
    if _holds_half(names, record.names):
        return True
    sizes = {name: file_sizes(split) for name, split in data.splits.items()}
    trained = np.concatenate(
        [of_split for name, of_split in sizes.items() if name in ("train", "val")]
        or [*sizes.values()]
    )
    # In both directions, because every size occurs among very many files.
    return _holds_half([*sizes.values()], record.sizes[record.sizes > 0]) and _holds_half(
        [record.sizes], trained
    )


def _hashes_without_split(samples: Samples) -> np.ndarray:
    """Return the hashes of the names below the folders of splits, (N,) uint64."""
    parts = (name.partition("/") for name in samples.names())
    return hashes(
        rest if first.lower() in SPLIT_NAMES and rest else first + slash + rest
        for first, slash, rest in parts
    )


def _holds_recorded_images(data: Any, record: SeenRecord) -> bool:
    """Return whether most images of a folder with a recorded name also have the recorded size and content.

    Names are not enough, because other numbered images have the same names. Sizes are not enough, because uncompressed
    images may all have one size. Contents are only compared if they are recorded.
    """
    order = np.argsort(record.names)
    num_named = 0  # images with a recorded name
    num_equal = 0  # those with the recorded size, too
    num_compared = 0
    num_copies = 0
    for split in data.splits.values():
        names = split.hashes()
        among = np.flatnonzero(np.isin(names, record.names))
        rows = order[np.searchsorted(record.names[order], names[among])]
        is_equal = file_sizes(split)[among] == record.sizes[rows]
        num_named += len(among)
        num_equal += int(np.count_nonzero(is_equal))
        if record.digests is not None:
            some = np.flatnonzero(is_equal & (record.digests[rows] != UNKNOWN))
            some = some[np.linspace(0, len(some) - 1, min(_MOST_COMPARED, len(some))).astype(int)]
            digests = file_digests(split.paths, among[some])[among[some]]
            num_compared += len(some)
            num_copies += int(np.count_nonzero(digests == record.digests[rows[some]]))
    is_same = 2 * num_equal > num_named and 2 * num_copies >= num_compared
    # otherwise a few copies under their old names would make a folder of new images the same folder
    if record.digests is not None:
        num_images = sum(map(len, data.splits.values()))
        is_same &= 2 * num_named >= min(len(record.names), num_images)
    return is_same


def _holds_half(here: Sequence[np.ndarray], recorded: np.ndarray) -> bool:
    """Return whether at least half of the recorded values are in `here`."""
    num_here = np.count_nonzero(np.isin(recorded, np.concatenate([recorded[:0], *here])))
    return bool(2 * num_here >= len(recorded))


def exclude_copies(
    data: Any, split: str, checkpoint: Mapping[str, Any], is_logged: bool = True
) -> None:
    """Exclude copies of training images from a split of another folder.

    Raises:
        ValueError: All images of the split are copies of training images.
    """
    seen = read_record(checkpoint)
    if seen is None or seen.digests is None or split not in data.splits:
        return
    is_copy = _are_among(_digests(data.splits[split], seen), seen, _num_seen(seen, split))
    if not is_copy.any():
        return
    count, first = _count_and_example(data, split, is_copy)
    _check_not_all_copies(data, split, is_copy)
    if is_logged:
        log.warning(
            "skipped %s: copies of images that the checkpoint was trained on, such as %s",
            count,
            first,
        )
    _keep_rows(data, split, ~is_copy)


def _check_not_all_copies(data: Any, split: str, is_copy: np.ndarray) -> None:
    """Check that a split does not only consist of copies of training images.

    Raises:
        ValueError: All images of the split are copies.
    """
    if is_copy.all():
        count, first = _count_and_example(data, split, is_copy)
        raise ValueError(
            f"this checkpoint has seen {count} in training: they are copies, such as {first}. Pass images that it "
            "was not trained on"
        )


def _num_seen(record: SeenRecord, split: str) -> int:
    """Return how many of the first rows of a record must not be evaluated. Val images may be validated again."""
    return record.num_train if split == "val" else len(record.names)


def _digests(samples: Samples, record: SeenRecord) -> np.ndarray:
    """Return the digests of a split's images, (N,) uint64. Only files with a recorded size are read."""
    sizes = file_sizes(samples)
    return file_digests(samples.paths, np.flatnonzero((sizes > 0) & np.isin(sizes, record.sizes)))


def _are_among(
    digests: np.ndarray, record: SeenRecord, num_seen: int, is_chosen: np.ndarray | None = None
) -> np.ndarray:
    """Return which digests are among the first `num_seen` rows of a record, or the chosen ones of these rows, (N,)."""
    assert record.digests is not None
    among = record.digests[:num_seen] if is_chosen is None else record.digests[:num_seen][is_chosen]
    return np.isin(digests, among[among != UNKNOWN])


def _count_and_example(data: Any, split: str, is_seen: np.ndarray) -> tuple[str, str]:
    """Return a text with the number of images in `is_seen`, and the path of the first of them."""
    samples = data.splits[split]
    count = f"{np.count_nonzero(is_seen)} of the {len(samples)} {split} images of {data.root}"
    return count, shown(samples.paths[int(np.argmax(is_seen))])


def _exclude_seen_rows(
    data: Any, split: str, checkpoint: Mapping[str, Any], record: SeenRecord, is_logged: bool
) -> None:
    """Exclude training images from a split of the folder that the checkpoint was trained on.

    Raises:
        ValueError: See `exclude_seen_of_same_folder`.
    """
    samples = data.splits[split]
    here = np.concatenate([part.hashes() for part in data.splits.values()])
    is_gone = ~np.isin(record.names[: _num_seen(record, split)], here)
    is_seen = _seen_rows(data, split, record, is_gone, is_logged)
    if (
        is_logged
        and not data.is_fitted
        and data.fingerprint != checkpoint["finetune"]["data_fingerprint"]
    ):
        _warn_of_changes(data, record, is_gone)
    if not is_seen.any():
        return
    count, first = _count_and_example(data, split, is_seen)
    before = checkpoint.get("datamodule_hyper_parameters", {})
    if (
        any(before.get(name) != data.hparams.get(name) for name in _DRAWN_BY)
        or not samples.is_drawn
        or is_seen.all()
    ):
        raise ValueError(
            f"this checkpoint has seen {count} in training, such as {first}. Pass images that it was not trained on, "
            "or use data.split_seed, val_fraction, test_fraction and group_by as in training"
        )
    if is_logged:
        log.warning("skipped %s, which the checkpoint was trained on, such as %s", count, first)
    _keep_rows(data, split, ~is_seen)


def _warn_of_changes(data: Any, record: SeenRecord, is_gone: np.ndarray) -> None:
    train = data.splits["train"].hashes() if "train" in data.splits else record.names[:0]
    num_new = np.count_nonzero(~np.isin(train, record.names))
    num_gone = counted(int(np.count_nonzero(is_gone)), "image is", "images are")
    changes = f"{num_gone} gone, {num_new} would be new to training"
    if not num_new and not is_gone.any():
        changes = "some images have another size, label or group"
    log.warning("%s has changed since training: %s", data.root, changes)


def _seen_rows(
    data: Any, split: str, record: SeenRecord, is_gone: np.ndarray, is_logged: bool
) -> np.ndarray:
    """Return which images of a split were trained on, (N,), also those that were renamed, moved or joined a group.

    Args:
        data: The data module.
        split: The split.
        record: The record of the checkpoint.
        is_gone: Which of the recorded images that must not be evaluated have a name that no image has now.
        is_logged: Whether this process warns of copies.

    Raises:
        ValueError: All images of the split are copies of training images.
    """
    samples = data.splits[split]
    names = samples.hashes()
    most = _num_seen(record, split)
    is_seen = np.isin(names, record.names[:most])
    # During a fit nothing has moved, and copies were reported at its start.
    if record.digests is not None and (is_gone.any() or not data.is_fitted):
        digests = _digests(samples, record)
        is_seen |= _are_among(digests, record, most, is_gone)  # renamed or moved
        is_copy = _are_among(digests, record, most) & ~is_seen
        if not data.is_fitted:
            _check_not_all_copies(data, split, is_copy)
        if is_logged and is_copy.any():
            count, first = _count_and_example(data, split, is_copy)
            log.warning(
                "%s are copies of images seen in training, such as %s: they are evaluated, too",
                count,
                first,
            )
    assert record.digests is not None, "checkpoints have digests"
    has_no_digest = is_gone & (record.digests[:most] == UNKNOWN)
    if has_no_digest.any():
        sizes = file_sizes(samples)
        is_alike = (sizes > 0) & np.isin(sizes, record.sizes[:most][has_no_digest])
        is_seen |= is_alike & np.isin(
            _hashes_without_split(samples), record.names[:most][has_no_digest]
        )
        if is_logged and (num := np.count_nonzero(is_alike & ~is_seen)):
            log.warning(
                "%d of the %s images may be training images under other names: they are equal in size",
                num,
                split,
            )
    return is_seen | _are_of_seen_groups(data, split, record.names[:most])


def _are_of_seen_groups(data: Any, split: str, seen: np.ndarray) -> np.ndarray:
    """Return which images of a split that was held out share a group with a training image, (N,).

    A group of one image that has grown may have changed its split.
    """
    samples = data.splits[split]
    if samples.groups is None or not samples.is_drawn:
        return np.zeros(len(samples), bool)
    parts = [part for part in data.splits.values() if part.groups is not None]
    groups = [part.groups[np.isin(part.hashes(), seen)] for part in parts]
    return np.isin(samples.groups, np.concatenate(groups))


def _keep_rows(data: Any, split: str, is_kept: np.ndarray) -> None:
    data.splits[split] = data.splits[split].take(np.flatnonzero(is_kept))
