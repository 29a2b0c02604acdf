"""Which pictures a checkpoint has seen in training, kept in it, so that none of them is measured as if it were new.

Not noticed: a copy of single pictures in another folder or under another name (only while the original is gone is its
size a hint), and what the weights that training began with had seen.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.data.splits import SET_APART, Split, hashes
from finetune.system.messages import counted

if TYPE_CHECKING:
    import pytorch_lightning as pl


log = logging.getLogger(__name__)

_DRAWN_BY = ("split_seed", "val_fraction", "test_fraction")


@dataclass(frozen=True)
class Seen:
    """Pictures by name and size, those of training first: 12 bytes each, so 12 MB of a checkpoint for a million.

    Attributes:
        names: `hashes` of their names (`Split.names`), (N,) uint64.
        sizes: Bytes of each file modulo 2**31, (N,) int32; 0 where it is no file.
        num_train: The first so many were trained on; on the others training was validated.
    """

    names: np.ndarray
    sizes: np.ndarray
    num_train: int

    def packed(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        names = torch.from_numpy(self.names.view(np.int64))
        return {"names": names, "sizes": torch.from_numpy(self.sizes), "num_train": self.num_train}

    def fingerprint(self, labels: np.ndarray) -> str:
        """Return a hash of names, sizes and labels of the training pictures: another one means other training data."""
        digest = hashlib.sha256(self.names[: self.num_train].tobytes())
        digest.update(self.sizes[: self.num_train].tobytes() + labels.tobytes())
        return digest.hexdigest()


def unpacked(seen: Mapping[str, Any]) -> Seen:
    return Seen(seen["names"].numpy().view(np.uint64), seen["sizes"].numpy(), seen["num_train"])


def seen_by(train: Split, val: Split | None, skip: bool = False) -> Seen:
    """Return the record of a run with these splits.

    Args:
        train: What it trains on.
        val: What it is validated on.
        skip: A file without a size, perhaps gone since it was found, is no error: reading it will tell.
    """
    both = [train, val] if val else [train]
    names, sizes = (np.concatenate(c) for c in zip(*((s.hashes(), _sizes(s.paths, skip)) for s in both), strict=True))
    return Seen(names, sizes, len(train.labels))


def describe(name: str, split: Split, root: str | None) -> str:
    """Return how many pictures a split holds and where they come from, in words."""
    num = len(split.labels)
    return f"{num} {name} picture{'s' * (num != 1)} of {root} ({split.origin})"


def hold_against(checkpoint: Mapping[str, Any], trainer: "pl.Trainer") -> None:
    """Make sure that `validate` and `test` measure pictures that training has not seen; warn where `fit` sees others.

    Class folders without splits are measured whole where they are not what the checkpoint was trained on.

    Raises:
        ValueError: Pictures to be measured were trained on.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    known = checkpoint["finetune"].get("seen")
    if getattr(data, "splits", None) is None:
        return  # loaders without a data module
    command, is_told = trainer.state.fn, trainer.is_global_zero
    split = "val" if command == "validate" else "test" if command == "test" else None
    if command == "fit":
        if not known and is_told:
            log.warning("the checkpoint, of an older version, does not say what it was trained on: not checked")
        elif known and is_told and checkpoint["finetune"]["data_fingerprint"] != data.fingerprint:
            log.warning("the training pictures are not those that this run began with: it will end differently")
        if known and data.seen:
            data.seen = _joined(data.seen, unpacked(known))
    elif split:
        if not keep_unseen(data, split, checkpoint, is_told):
            data.take_whole(split)
        if is_told and split in data.splits and not data.is_fitted:
            log.info(describe(split, data.splits[split], data.root))
            if not known:
                log.warning("the checkpoint, of an older version, does not say what it has seen of them: not checked")


def keep_unseen(data: Any, split: str, checkpoint: Mapping[str, Any], is_told: bool = True) -> bool:
    """Leave out of a split what the checkpoint has seen in training; return whether these are its training data.

    Raises:
        ValueError: They are, and the split is made of pictures that were trained on.
    """
    known = checkpoint["finetune"].get("seen")
    if not _is_trained_on(data, checkpoint, unpacked(known) if known else None, is_told):
        return False
    if known and split in data.splits:
        _leave_out_seen(data, split, checkpoint, unpacked(known), is_told)
    return True


def _is_trained_on(data: Any, checkpoint: Mapping[str, Any], known: Seen | None, is_told: bool) -> bool:
    """Return whether this is the folder that the checkpoint was trained on, perhaps moved or renamed.

    It is, if it lies where that lay and holds half of its pictures by name or size, for another may be mounted there;
    or if most of the pictures that have the names have the sizes as well: numbered pictures of another set have the
    same names.
    """
    root = checkpoint.get("datamodule_hyper_parameters", {}).get("root") or data.default_root
    is_there = bool(root) and os.path.realpath(root) == os.path.realpath(data.root)
    if known is None:
        return is_there
    if is_there:  # also by the names that they had before somebody moved them into the folder of a split
        here = [replace(split, tag=tag).hashes() for split in data.splits.values() for tag in {split.tag, ""}]
        if _holds_half(here, known.names):
            return True
        sizes = {name: _sizes(split.paths, True) for name, split in data.splits.items()}  # or they have other names
        trained = np.concatenate(
            [found for name, found in sizes.items() if name in ("train", "val")] or [*sizes.values()]
        )
        # Both ways: among very many other files each size comes up.
        if _holds_half([*sizes.values()], known.sizes[known.sizes > 0]) and _holds_half([known.sizes], trained):
            return True
    order = np.argsort(known.names)
    num = num_equal = 0
    for split in data.splits.values():
        names = split.hashes()
        among = np.flatnonzero(np.isin(names, known.names))
        sizes = known.sizes[order][np.searchsorted(known.names[order], names[among])]
        num, num_equal = num + len(among), num_equal + int(np.count_nonzero(_sizes(split.paths, True, among) == sizes))
    is_same = 2 * num_equal > num
    if is_there and not is_same and is_told:
        log.warning("%s holds few of the pictures that this checkpoint was trained on: taken for new ones", data.root)
    return is_same


def _holds_half(here: Sequence[np.ndarray], known: np.ndarray) -> bool:
    return bool(2 * np.count_nonzero(np.isin(known, np.concatenate([known[:0], *here]))) >= len(known))


def _leave_out_seen(data: Any, split: str, checkpoint: Mapping[str, Any], known: Seen, is_told: bool) -> None:
    given = data.splits[split]
    names, most = given.hashes(), known.num_train if split == "val" else len(known.names)
    here = np.concatenate([part.hashes() for part in data.splits.values()])
    gone = ~np.isin(known.names[:most], here)
    is_seen = np.isin(names, known.names[:most])
    if gone.any():
        sizes = _sizes(given.paths, True)
        is_alike = (sizes > 0) & np.isin(sizes, known.sizes[:most][gone])
        is_seen |= is_alike & np.isin(hashes(replace(given, tag="").names()), known.names[:most][gone])
        if is_told and (num := np.count_nonzero(is_alike & ~is_seen)):
            log.warning("%d of the %s pictures may be training pictures under other names: equal in size", num, split)
    if is_told and not data.is_fitted and data.fingerprint != checkpoint["finetune"]["data_fingerprint"]:
        train = data.splits["train"].hashes() if "train" in data.splits else names[:0]
        num_new = np.count_nonzero(~np.isin(train, known.names))
        num_gone = counted(int(np.count_nonzero(gone)), "picture is", "pictures are")
        log.warning("%s is not as in training: %s gone, %d would be new to training", data.root, num_gone, num_new)
    if not is_seen.any():
        return
    count = f"{np.count_nonzero(is_seen)} of the {len(names)} {split} pictures of {data.root}"
    first = given.paths[int(np.argmax(is_seen))]
    before = checkpoint.get("datamodule_hyper_parameters", {})
    if (
        any(before.get(name) != data.hparams.get(name) for name in _DRAWN_BY)
        or given.origin != SET_APART
        or is_seen.all()
    ):
        raise ValueError(
            f"this checkpoint has seen {count} in training, {first} for one; give pictures that are new to it, or "
            "leave data.split_seed, val_fraction and test_fraction as it has them"
        )
    if is_told:
        log.warning("left out %s, which the checkpoint has seen in training: %s for one", count, first)
    kept = np.flatnonzero(~is_seen)
    paths = type(given.paths)(given.paths[int(i)] for i in kept)
    data.splits[split] = replace(given, read=partial(_read, given.read, kept), labels=given.labels[kept], paths=paths)


def _read(read: Any, indices: np.ndarray, index: int) -> np.ndarray:
    return read(int(indices[index]))


def _joined(now: Seen, before: Seen) -> Seen:
    """Return what either has seen."""
    learned, learns = before.names[: before.num_train], now.names[: now.num_train]
    if np.isin(before.names, now.names).all() and np.isin(learned, learns).all():
        return now

    def both(part: Callable[[Seen], slice]) -> tuple[np.ndarray, np.ndarray]:
        names = np.concatenate([seen.names[part(seen)] for seen in (now, before)])
        sizes = np.concatenate([seen.sizes[part(seen)] for seen in (now, before)])
        first = np.unique(names, return_index=True)[1]
        return names[first], sizes[first]

    train, rest = both(lambda seen: slice(seen.num_train)), both(lambda seen: slice(seen.num_train, None))
    return Seen(np.concatenate([train[0], rest[0]]), np.concatenate([train[1], rest[1]]), len(train[0]))


def _sizes(paths: Any, skip: bool, indices: np.ndarray | None = None) -> np.ndarray:
    found = []
    for i in range(len(paths)) if indices is None else indices.tolist():
        try:
            found.append(os.stat(paths[i]).st_size % 2**31)
        except OSError:
            if not skip:
                raise
            found.append(0)
    return np.array(found, np.int32)
