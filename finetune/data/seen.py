"""Leave the images that a checkpoint was trained on out of its evaluation, by the record in the checkpoint.

They are recognised by name and, in any folder, by content (`contents`); in checkpoints of earlier versions only by
name and size. Not recorded: the images that the initial weights were trained on.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.data.contents import UNKNOWN, file_digests
from finetune.data.samples import Samples
from finetune.data.seen_record import Seen, file_sizes, recorded
from finetune.data.splits import SET_APART, hashes
from finetune.system.messages import counted, shown

log = logging.getLogger(__name__)

_DRAWN_BY = ("split_seed", "val_fraction", "test_fraction")
_MOST_COMPARED = 1000  # images of a folder, to decide whether it is the one trained on


def describe(name: str, split: Samples, root: str | None) -> str:
    """Return how many pictures a split holds and where they come from, in words."""
    num = len(split)
    return f"{num} {name} picture{'s' * (num != 1)} of {root} ({split.origin})"


def continue_record(data: Any, checkpoint: Mapping[str, Any], is_told: bool = True) -> None:
    """Let a fit that continues from a checkpoint also record the images that were trained on before it.

    Args:
        data: The data module of the fit, before the fit begins.
        checkpoint: The checkpoint.
        is_told: Whether this process warns of images that the checkpoint was not trained on.
    """
    known = recorded(checkpoint)
    if not known and is_told:
        log.warning(
            "the checkpoint, of an older version, does not say what it was trained on: not checked"
        )
    elif known and is_told and checkpoint["finetune"]["data_fingerprint"] != data.fingerprint:
        log.warning(
            "the training pictures are not those that this run began with: it will end differently"
        )
    if known:
        data.seen_before = known


def exclude_seen(
    data: Any, split: str, checkpoint: Mapping[str, Any], is_told: bool = True
) -> None:
    """Leave the images that a checkpoint was trained on out of a split, before it is evaluated.

    Class folders without splits are evaluated completely if they are not what the checkpoint was trained on.

    Args:
        data: The data module; its split changes.
        split: `val` or `test`.
        checkpoint: The checkpoint.
        is_told: Whether this process logs what is evaluated.

    Raises:
        ValueError: Images to be evaluated were trained on.
    """
    if not keep_unseen(data, split, checkpoint, is_told):
        data.take_whole(split)
        leave_out_copies(data, split, checkpoint, is_told)
    if is_told and split in data.splits and not data.is_fitted:
        log.info(describe(split, data.splits[split], data.root))
        if recorded(checkpoint) is None:
            log.warning(
                "the checkpoint, of an older version, does not say what it has seen of them: not checked"
            )


def keep_unseen(data: Any, split: str, checkpoint: Mapping[str, Any], is_told: bool = True) -> bool:
    """Leave images that the checkpoint was trained on out of a split, if this is the folder that it was trained on.

    Returns:
        Whether this is that folder.

    Raises:
        ValueError: It is, and images of the split were trained on, but not by a change of the folder alone: all of them
            were, the split has a folder of its own, or training used other settings of the split.
    """
    known = recorded(checkpoint)
    if not _is_trained_on(data, checkpoint, known, is_told):
        return False
    if known and split in data.splits:
        _leave_out_seen(data, split, checkpoint, known, is_told)
    return True


def _is_trained_on(
    data: Any, checkpoint: Mapping[str, Any], known: Seen | None, is_told: bool
) -> bool:
    """Return whether this is the folder that the checkpoint was trained on, perhaps moved or renamed.

    There are two ways to recognise it:

    - By its path, if it also holds half of the recorded images by name or by size. Another disk may be mounted there.
    - By its images: of those with a recorded name most also have the recorded size and, where it is recorded, the
      content. Names are not enough, since another set of numbered images has the same; nor are sizes, since
      uncompressed images may all have one size.
    """
    root = checkpoint.get("datamodule_hyper_parameters", {}).get("root") or data.default_root
    is_there = bool(root) and os.path.realpath(root) == os.path.realpath(data.root)
    if known is None:
        return is_there
    # also by the names that images had before they were moved into the folder of a split
    if is_there:
        here = [
            replace(split, tag=tag).hashes()
            for split in data.splits.values()
            for tag in {split.tag, ""}
        ]
        if _holds_half(here, known.names):
            return True
        # or they were renamed
        sizes = {name: file_sizes(split) for name, split in data.splits.items()}
        trained = np.concatenate(
            [found for name, found in sizes.items() if name in ("train", "val")]
            or [*sizes.values()]
        )
        # In both directions: among very many other files every size occurs.
        if _holds_half([*sizes.values()], known.sizes[known.sizes > 0]) and _holds_half(
            [known.sizes], trained
        ):
            return True
    order = np.argsort(known.names)
    num = num_equal = num_compared = num_copies = 0
    for split in data.splits.values():
        names = split.hashes()
        among = np.flatnonzero(np.isin(names, known.names))
        rows = order[np.searchsorted(known.names[order], names[among])]
        is_equal = file_sizes(split)[among] == known.sizes[rows]
        num, num_equal = num + len(among), num_equal + int(np.count_nonzero(is_equal))
        if known.digests is not None:
            some = np.flatnonzero(is_equal & (known.digests[rows] != UNKNOWN))
            some = some[np.linspace(0, len(some) - 1, min(_MOST_COMPARED, len(some))).astype(int)]
            digests = file_digests(split.paths, among[some])[among[some]]
            num_compared += len(some)
            num_copies += int(np.count_nonzero(digests == known.digests[rows[some]]))
    is_same = 2 * num_equal > num and 2 * num_copies >= num_compared
    # else a few copies under their old names would make a folder of new images the same
    if known.digests is not None:
        is_same &= 2 * num >= min(len(known.names), sum(map(len, data.splits.values())))
    if is_there and not is_same and is_told:
        log.warning(
            "%s holds few of the pictures that this checkpoint was trained on: taken for new ones",
            data.root,
        )
    return is_same


def _holds_half(here: Sequence[np.ndarray], known: np.ndarray) -> bool:
    return bool(
        2 * np.count_nonzero(np.isin(known, np.concatenate([known[:0], *here]))) >= len(known)
    )


def leave_out_copies(
    data: Any, split: str, checkpoint: Mapping[str, Any], is_told: bool = True
) -> None:
    """Leave copies of the images that the checkpoint was trained on out of a split of another folder.

    Raises:
        ValueError: All images of the split are such copies.
    """
    seen = recorded(checkpoint)
    if seen is None or seen.digests is None or split not in data.splits:
        return
    is_copy = _are_among(_digests(data.splits[split], seen), seen, _num_seen(seen, split))
    if not is_copy.any():
        return
    count, first = _counted(data, split, is_copy)
    _check_not_all_copies(data, split, is_copy)
    if is_told:
        log.warning(
            "left out %s: copies of pictures that the checkpoint was trained on, such as %s",
            count,
            first,
        )
    _keep(data, split, ~is_copy)


def _check_not_all_copies(data: Any, split: str, is_copy: np.ndarray) -> None:
    """Make sure that some images of a split are no copies of training images.

    Raises:
        ValueError: All of them are.
    """
    if is_copy.all():
        count, first = _counted(data, split, is_copy)
        raise ValueError(
            f"this checkpoint has seen {count} in training: they are copies, such as {first}. Give pictures that it "
            "was not trained on"
        )


def _num_seen(known: Seen, split: str) -> int:
    """Return how many of the first rows of a record must not be measured; validation images may be measured again."""
    return known.num_train if split == "val" else len(known.names)


def _digests(given: Samples, known: Seen) -> np.ndarray:
    """Return digests (N,) uint64 of a split's images; only those with a size in the record are read."""
    sizes = file_sizes(given)
    return file_digests(given.paths, np.flatnonzero((sizes > 0) & np.isin(sizes, known.sizes)))


def _are_among(
    digests: np.ndarray, known: Seen, num_seen: int, is_gone: np.ndarray | None = None
) -> np.ndarray:
    """Return which digests are among the first `num_seen` of a record, or those that `is_gone` selects, (N,)."""
    assert known.digests is not None
    among = known.digests[:num_seen] if is_gone is None else known.digests[:num_seen][is_gone]
    return np.isin(digests, among[among != UNKNOWN])


def _counted(data: Any, split: str, is_seen: np.ndarray) -> tuple[str, str]:
    """Return how many pictures of a split were seen, in words, and the path of the first."""
    given = data.splits[split]
    count = f"{np.count_nonzero(is_seen)} of the {len(given)} {split} pictures of {data.root}"
    return count, shown(given.paths[int(np.argmax(is_seen))])


def _leave_out_seen(
    data: Any, split: str, checkpoint: Mapping[str, Any], known: Seen, is_told: bool
) -> None:
    given = data.splits[split]
    names, most = given.hashes(), _num_seen(known, split)
    here = np.concatenate([part.hashes() for part in data.splits.values()])
    gone = ~np.isin(known.names[:most], here)
    is_seen = np.isin(names, known.names[:most])
    # a fit has warned at its start
    if known.digests is not None and (gone.any() or not data.is_fitted):
        digests = _digests(given, known)
        is_seen |= _are_among(digests, known, most, gone)  # renamed or moved
        is_copy = _are_among(digests, known, most) & ~is_seen
        if not data.is_fitted:
            _check_not_all_copies(data, split, is_copy)
        if is_told and is_copy.any():
            count, first = _counted(data, split, is_copy)
            log.warning(
                "%s are copies of pictures seen in training, such as %s: they are measured, too",
                count,
                first,
            )
    without = gone if known.digests is None else gone & (known.digests[:most] == UNKNOWN)
    if without.any():
        sizes = file_sizes(given)
        is_alike = (sizes > 0) & np.isin(sizes, known.sizes[:most][without])
        is_seen |= is_alike & np.isin(
            hashes(replace(given, tag="").names()), known.names[:most][without]
        )
        if is_told and (num := np.count_nonzero(is_alike & ~is_seen)):
            log.warning(
                "%d of the %s pictures may be training pictures under other names: equal in size",
                num,
                split,
            )
    if (
        is_told
        and not data.is_fitted
        and data.fingerprint != checkpoint["finetune"]["data_fingerprint"]
    ):
        train = data.splits["train"].hashes() if "train" in data.splits else names[:0]
        num_new = np.count_nonzero(~np.isin(train, known.names))
        num_gone = counted(int(np.count_nonzero(gone)), "picture is", "pictures are")
        log.warning(
            "%s is not as in training: %s gone, %d would be new to training",
            data.root,
            num_gone,
            num_new,
        )
    if not is_seen.any():
        return
    count, first = _counted(data, split, is_seen)
    before = checkpoint.get("datamodule_hyper_parameters", {})
    if (
        any(before.get(name) != data.hparams.get(name) for name in _DRAWN_BY)
        or given.origin != SET_APART
        or is_seen.all()
    ):
        raise ValueError(
            f"this checkpoint has seen {count} in training, such as {first}. Give pictures that it was not trained on, "
            "or leave data.split_seed, val_fraction and test_fraction as they were in training"
        )
    if is_told:
        log.warning("left out %s, which the checkpoint was trained on, such as %s", count, first)
    _keep(data, split, ~is_seen)


def _keep(data: Any, split: str, is_kept: np.ndarray) -> None:
    data.splits[split] = data.splits[split].take(np.flatnonzero(is_kept))
