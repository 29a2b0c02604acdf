"""What the frozen part of a network makes of each picture, computed once: the rest then trains on that alone.

That needs pictures that are the same in every epoch: `--data.num_views`, or no random transforms. The activations lie
beside the decoded pictures of `cache`, and later runs with the same pictures and frozen weights find them there.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import albumentations
import cv2
import PIL
import pytorch_lightning as pl
import torch
import torchvision
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import finetune
from finetune.caches import ACTIVATIONS, cache_dir, files_digest, mark_used, room
from finetune.cut import cut, folded
from finetune.packed import unfinished
from finetune.pictures import Activations, Collate, FileReader, GreyReader
from finetune.sampling import num_reads, share
from finetune.sharding import is_sharded
from finetune.workers import Loader

if TYPE_CHECKING:
    from finetune.classifier import Classifier
    from finetune.picture_data import PictureData

log = logging.getLogger(__name__)

# Shapes: N pictures of a split, V views of each.

_NUM_AT_ONCE = 64  # pictures at most, and not more than a batch: the memory is there
_DEAD_AFTER = 86_400  # seconds without a write
_T = TypeVar("_T")


class Unavailable(Exception):
    """Why there are no activations."""


def use_activations(model: "Classifier", data: "PictureData") -> None:
    """Let the rest of the model train and validate on activations from now on, where that can be and pays.

    They are found from an earlier run or computed, on all devices. Where they can't be had (a full disk, more than
    `data.cache_limit_gb`, a picture that can't be decoded), a line says why, and every epoch computes all.
    """
    if not pays(model, data):
        return
    found: dict[str, Activations] = {}
    try:
        parts = cut(model.network, model.frozen)
        if parts is None:
            raise Unavailable(f"{model.backbone} can't be cut there")
        for split in ("train", "val"):
            if split in data.splits:
                found[split] = Activations(_rows(model, data, split, parts[0]), data.splits[split].labels)
    except Unavailable as error:
        if model.trainer.is_global_zero:
            log.warning("what is frozen is computed anew in every epoch: %s", error)
        return
    data.activations = found
    model.rest = parts[1].forward  # not the module: its weights are in the model already


def pays(model: Any, data: Any) -> bool:
    """Return whether something is frozen, pictures come back unchanged, and a fit reads them more than once."""
    views = getattr(data, "num_views", None)
    if views is None or not getattr(model, "frozen", None) or data.cache_limit_gb <= 0:
        return False
    trainer, num = model.trainer, len(data.splits["train"].labels) if "train" in data.splits else 0
    is_fit = trainer.state.fn == "fit" and not is_sharded(trainer)
    return is_fit and num_reads(trainer, num, data.batch_size) > views * num


def _rows(model: "Classifier", data: "PictureData", split: str, frozen: nn.Module) -> Tensor:
    """Return the activations of a split, one row for each view of each picture."""
    trainer = model.trainer

    def look() -> tuple[Path, tuple[int, ...], torch.dtype, bool]:
        pictures = data.pictures(split, train=split == "train", reads=1)  # nothing is kept of them yet
        first = _activations(model, frozen, Collate(data.image_size)([pictures[data.key(split, 0)]]))
        shape = (data.num_rows(split), *first.shape[1:])
        name = f"{Path(data.root or '').resolve().name}-{_key(model, data, split, frozen)[:16]}{ACTIVATIONS}"
        path = cache_dir() / name
        is_there = path.exists() and path.stat().st_size == math.prod(shape) * first.dtype.itemsize
        return path, shape, first.dtype, is_there

    path, shape, dtype, is_there = _in_step(trainer, look)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not trainer.strategy.reduce_boolean_decision(is_there, all=True):
        began = time.perf_counter()
        token = trainer.strategy.broadcast(os.urandom(4).hex())
        temporary = path.with_name(f".{path.name}.{token}-{trainer.node_rank}.tmp")
        try:
            _in_step(trainer, lambda: _reserve(trainer, temporary, num_bytes, data.cache_limit_gb))
            _in_step(trainer, lambda: _fill(model, data, split, frozen, _mapped(temporary, shape, dtype, shared=True)))
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
        return torch.from_file(str(path), shared=shared, size=math.prod(shape), dtype=dtype).view(shape)
    except RuntimeError as error:  # torch's word for a file that is gone, or may not be read
        raise Unavailable(" ".join(str(error).split())) from error


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
            raise Unavailable(f"{failure.strerror or failure}: {failure.filename or cache_dir()}") from failure
        raise failure
    return cast(_T, result)


def _reserve(trainer: pl.Trainer, path: Path, num_bytes: int, limit_gb: float) -> None:
    if trainer.local_rank != 0:
        return
    for old in unfinished(path.parent / f"*{ACTIVATIONS}"):
        if time.time() - old.stat().st_mtime > _DEAD_AFTER:  # of a run that was killed
            old.unlink(missing_ok=True)
    limit = min(limit_gb * 1e9, room(path.parent))
    if num_bytes > limit:
        words = f"{num_bytes / 1e9:.2g} GB of activations would be above --data.cache_limit_gb or half the free disk"
        raise Unavailable(f"{words}, {limit / 1e9:.2g} GB")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        if hasattr(os, "posix_fallocate"):  # a disk that is full then says so here: at a write to the map it would kill
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        file.truncate(num_bytes)


def _finish(trainer: pl.Trainer, temporary: Path, path: Path) -> None:
    if trainer.local_rank == 0:
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # the name is not to be there before the content is, whatever happens
        temporary.replace(path)


def _fill(model: "Classifier", data: "PictureData", split: str, frozen: nn.Module, rows: Tensor) -> None:
    """Compute this device's part of a machine's activations."""
    num_at_once = min(_NUM_AT_ONCE, math.ceil(data.batch_size / model.trainer.world_size))
    part = share(len(rows), model.trainer.local_rank, model.trainer.num_devices)
    chosen = [part[i : i + num_at_once] for i in range(0, len(part), num_at_once)]
    batches = [[data.key(split, row) for row in batch] for batch in chosen]
    pictures = data.pictures(split, train=split == "train", reads=data.num_views or 1)
    options = data.worker_options(num_at_once)
    if "bf16" in str(model.trainer.precision):  # which rounds more than folding does: float32 stays what it was
        frozen = folded(frozen)
    loader = Loader(pictures, batch_sampler=batches, collate_fn=Collate(data.image_size), **options)
    console = Console(stderr=True)
    hidden = not console.is_terminal or not model.trainer.is_global_zero
    shown = track(loader, "computing what is frozen", len(batches), console=console, transient=True, disable=hidden)
    for batch, where in zip(shown, chosen, strict=True):
        rows[where.start : where.stop] = _activations(model, frozen, batch)


@torch.no_grad()
def _activations(model: "Classifier", frozen: nn.Module, batch: dict[str, Any]) -> Tensor:
    if batch["bad"]:
        raise Unavailable(batch["bad"][0][1])
    with model.trainer.precision_plugin.forward_context():
        activations = frozen(model.normalized(batch["image"].to(model.device))).cpu()
    return activations.permute(0, 2, 3, 1) if activations.ndim == 4 else activations


def _key(model: "Classifier", data: "PictureData", split: str, frozen: nn.Module) -> str:
    """Return a hash of all that decides about the activations."""
    digest = hashlib.sha256()
    read: Any = data.splits[split].read
    files = getattr(read, "files", read)  # of what was decoded before
    if isinstance(files, FileReader):
        digest.update(files_digest(files.paths, data.root or "").encode())
    elif isinstance(files, GreyReader):
        digest.update(files.pixels.tobytes())
    else:
        raise Unavailable(f"{type(files).__name__} does not say which pictures it reads")
    is_train = split == "train"
    pictures = data.pictures(split, is_train, reads=1)
    # A transform's own words may leave out what it was told; evaluation has none but ours.
    settings = {**data.hparams, "root": None, "batch_size": None} if is_train else data.cache_size
    versions = [str(module.__version__) for module in (finetune, torch, torchvision, albumentations, cv2, PIL)]
    about = (split, pictures.seed * is_train, repr(pictures.transform), settings, os.path.realpath(data.root or ""))
    digest.update(repr((*about, model.trainer.precision, model.device.type, model.backbone, versions)).encode())
    for tensor in (model.mean, model.std, *frozen.state_dict().values()):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
