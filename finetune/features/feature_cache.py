"""What the frozen part of a network makes of each picture, computed once: the rest then trains on that alone.

That needs pictures that are the same in every epoch: `--data.num_views`, or no random transforms. The features lie
beside the decoded pictures of `image_cache`, and later runs with the same pictures and frozen weights find them there.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import pytorch_lightning as pl
import torch
import torchvision
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import finetune
from finetune.data.datamodule import ImageDataModule
from finetune.data.dataset import FeatureDataset
from finetune.data.samplers import num_reads, share
from finetune.models.ensemble import members
from finetune.models.fx import fuse_batch_norm, split_frozen
from finetune.models.timm_backbones import is_timm
from finetune.system.cache_dir import (
    FEATURES,
    HEADER_BYTES,
    MARK,
    cache_dir,
    has_mark,
    is_sealed,
    mark_used,
    room,
    seal,
)
from finetune.system.files import put_in_place, remove_dead, unfinished_of
from finetune.system.messages import reason

log = logging.getLogger(__name__)

# Shapes: N pictures of a split, V views of each.

_NUM_AT_ONCE = 64  # pictures at most, and not more than a batch: the memory is there
_T = TypeVar("_T")


class Unavailable(Exception):
    """Why there are no features."""


class Part(NamedTuple):
    """The frozen part of a network.

    Attributes:
        name: Of the network.
        normalize: From pictures (B, 3, h, w) uint8 to what the frozen part takes.
        constants: What `normalize` computes with.
        frozen: From there to features.
    """

    name: str
    normalize: Callable[[Tensor], Tensor]
    constants: Sequence[Tensor]
    frozen: nn.Module = nn.Identity()


def pays(trainer: pl.Trainer, data: ImageDataModule) -> bool:
    """Return whether pictures come back unchanged, and a fit reads them more than once."""
    views = getattr(data, "num_views", None)
    if views is None or data.cache_limit_gb <= 0:
        return False
    num = len(data.splits["train"].labels) if "train" in data.splits else 0
    is_fit = trainer.state.fn == "fit"
    return is_fit and num_reads(trainer, num, data.batch_size) > views * num


def use_features(
    trainer: pl.Trainer, part: Part, network: nn.Module, frozen: Sequence[nn.Module], data: ImageDataModule
) -> nn.Module | None:
    """Hand the data what the frozen part of a network makes of train and val, and return the rest of it.

    Where they can't be had, a line says why, and every epoch computes all.

    Args:
        trainer: Of all devices.
        part: What is known of the part before the network is cut.
        network: It goes on to hold all weights.
        frozen: Its first stages.
        data: Its `features` are set.
    """
    try:
        if len(members(network)) > 1:
            raise Unavailable("it is kept for one network, not for several (model.members)")
        parts = split_frozen(network, frozen)
        if parts is None:
            raise Unavailable(f"{part.name} can't be cut there")
        data.features = cached_features(trainer, part._replace(frozen=parts[0]), data)
        return parts[1]
    except Unavailable as error:
        if trainer.is_global_zero:
            log.warning("what is frozen is computed anew in every epoch: %s", error)
        return None


def cached_features(trainer: pl.Trainer, part: Part, data: ImageDataModule) -> dict[str, FeatureDataset]:
    """Return what the frozen part makes of train and val, found from an earlier run or computed, on all devices.

    Raises:
        Unavailable: On all devices, where one can't have them: a full disk, more than `data.cache_limit_gb`, a picture
            that can't be decoded.
    """
    splits = [split for split in ("train", "val") if split in data.splits]
    return {split: FeatureDataset(_rows(trainer, part, data, split), data.splits[split].labels) for split in splits}


def _rows(trainer: pl.Trainer, part: Part, data: ImageDataModule, split: str) -> Tensor:
    """Return the features of a split, one row for each view of each picture."""

    def look() -> tuple[Path, tuple[int, ...], torch.dtype, bool]:
        first = _features(trainer, part, next(iter(data.row_loader(split, range(1), 1, is_look=True))))
        shape = (data.num_rows(split), *first.shape[1:])
        path = cache_dir() / f"{Path(data.root or '').resolve().name}-{_key(trainer, part, data, split)}{FEATURES}"
        is_there = path.exists()
        if is_there and trainer.local_rank == 0 and not is_sealed(path, math.prod(shape) * first.dtype.itemsize):
            log.warning("the features in %s are damaged: they are computed anew", path)
            is_there = False
        return path, shape, first.dtype, is_there

    path, shape, dtype, is_there = _in_step(trainer, look)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not trainer.strategy.reduce_boolean_decision(is_there, all=True):
        began = time.perf_counter()
        token = trainer.strategy.broadcast(os.urandom(4).hex())
        temporary = path.with_name(f".{path.name}.{token}-{trainer.node_rank}.tmp")
        try:
            _in_step(trainer, lambda: _reserve(trainer, temporary, num_bytes, data.cache_limit_gb))
            _in_step(trainer, lambda: _fill(trainer, part, data, split, _mapped(temporary, shape, dtype, shared=True)))
            _in_step(trainer, lambda: _finish(trainer, temporary, path))
        finally:
            if trainer.local_rank == 0:
                temporary.unlink(missing_ok=True)
        if trainer.is_global_zero:
            seconds = time.perf_counter() - began
            words = "computed what is frozen once, for %s pictures of %s in %.1f s: %.2f GB in %s"
            log.info(words, f"{shape[0]:,}", split, seconds, num_bytes / 1e9, path)
    mark_used(path)
    return _in_step(trainer, lambda: _mapped(path, shape, dtype, shared=False))


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> Tensor:
    """Return a map of a file, which takes memory only as long as there is some to spare; `shared` to write to it."""
    try:
        num_bytes = HEADER_BYTES + math.prod(shape) * dtype.itemsize
        content = torch.from_file(str(path), shared=shared, size=num_bytes, dtype=torch.uint8)
        return content[HEADER_BYTES:].view(dtype).view(shape)
    except RuntimeError as error:  # torch's word for a file that is gone, or may not be read
        raise Unavailable(reason(error)) from error


def _in_step(trainer: pl.Trainer, act: Callable[[], _T]) -> _T:
    """Do what may fail on one device, on all: if it does, none goes on."""
    result, failure = None, None
    try:
        result = act()
    except Exception as error:
        failure = error
    if not trainer.strategy.reduce_boolean_decision(failure is None, all=True):
        if failure is None:
            raise Unavailable("another process can't keep it")
        if isinstance(failure, OSError):
            raise Unavailable(reason(failure, cache_dir())) from failure
        raise failure
    return cast(_T, result)


def _reserve(trainer: pl.Trainer, path: Path, num_bytes: int, limit_gb: float) -> None:
    if trainer.local_rank != 0:
        return
    remove_dead(filter(has_mark, unfinished_of(path.parent, f"*{FEATURES}")))
    limit = min(limit_gb * 1e9, room(path.parent))
    if num_bytes > limit:
        words = f"{num_bytes / 1e9:.2g} GB of features would be above --data.cache_limit_gb or half the free disk"
        raise Unavailable(f"{words}, {limit / 1e9:.2g} GB")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        if hasattr(os, "posix_fallocate"):  # a disk that is full then says so here: at a write to the map it would kill
            os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + num_bytes)
        file.truncate(HEADER_BYTES + num_bytes)
        file.write(MARK)


def _finish(trainer: pl.Trainer, temporary: Path, path: Path) -> None:
    if trainer.local_rank == 0:
        seal(temporary)
        put_in_place(temporary, path)


def _fill(trainer: pl.Trainer, part: Part, data: ImageDataModule, split: str, rows: Tensor) -> None:
    """Compute this device's part of a machine's features."""
    num_at_once = min(_NUM_AT_ONCE, math.ceil(data.batch_size / trainer.world_size))
    mine = share(len(rows), trainer.local_rank, trainer.world_size // trainer.num_nodes)
    if "bf16" in str(trainer.precision):  # which rounds more than folding does: float32 stays what it was
        part = part._replace(frozen=fuse_batch_norm(part.frozen))
    loader = data.row_loader(split, mine, num_at_once)
    console = Console(stderr=True)
    hidden = not console.is_terminal or not trainer.is_global_zero
    batches = track(loader, "computing what is frozen", len(loader), console=console, transient=True, disable=hidden)
    for i, batch in enumerate(batches):
        where = mine[i * num_at_once : (i + 1) * num_at_once]
        rows[where.start : where.stop] = _features(trainer, part, batch)


@torch.no_grad()
def _features(trainer: pl.Trainer, part: Part, batch: dict[str, Any]) -> Tensor:
    if batch["bad"]:
        raise Unavailable(batch["bad"][0][1])
    with trainer.precision_plugin.forward_context():
        features = part.frozen(part.normalize(batch["image"].to(trainer.strategy.root_device))).cpu()
    return features.permute(0, 2, 3, 1) if features.ndim == 4 else features


def _key(trainer: pl.Trainer, part: Part, data: ImageDataModule, split: str) -> str:
    """Return a hash of all that decides about the features."""
    try:
        pictures = data.identity(split)
    except ValueError as error:
        raise Unavailable(str(error)) from error
    about = pictures, trainer.precision, trainer.strategy.root_device.type, part.name
    makers = [finetune, torch, torchvision]
    if is_timm(part.name):
        import timm

        makers.append(timm)
    versions = [str(module.__version__) for module in makers]
    digest = hashlib.sha256(repr((*about, versions)).encode())
    for tensor in (*part.constants, *part.frozen.state_dict().values()):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
