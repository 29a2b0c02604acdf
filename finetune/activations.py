"""What the frozen part of a network makes of each picture, computed once: the rest then trains on that alone.

That needs pictures that are the same in every epoch: `--data.num_views`, or no random transforms. The activations lie
beside the decoded pictures of `cache`, and later runs with the same pictures and frozen weights find them there.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from finetune.caches import ACTIVATIONS, cache_dir, files_digest, mark_used, room
from finetune.cut import cut
from finetune.pictures import Collate, GreyReader
from finetune.sampling import share
from finetune.sharding import is_sharded

if TYPE_CHECKING:
    from finetune.classifier import Classifier
    from finetune.picture_data import PictureData

log = logging.getLogger(__name__)

# Shapes: N pictures of a split, V views of each, C channels.

_NUM_AT_ONCE = 64  # pictures: no gradients are kept


class Activations(Dataset[dict[str, Any]]):
    """Batches of activations by key: (epoch, index) in training, where views take turns, else a row.

    Args:
        rows: (V x N, D), or maps (V x N, h, w, C); the first view of all pictures comes first.
        labels: (N,).
    """

    def __init__(self, rows: Tensor, labels: np.ndarray) -> None:
        self.rows, self.labels = rows, torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[int | tuple[int, int]]) -> dict[str, Any]:
        num = len(self.labels)
        chosen = [(key[0] * num + key[1]) % len(self.rows) if isinstance(key, tuple) else key for key in keys]
        rows = torch.tensor(chosen, dtype=torch.int64)
        return {"image": _as_map(self.rows[rows]), "label": self.labels[rows % num], "index": rows % num, "bad": []}


class Unavailable(Exception):
    """Why there are no activations."""


def use_activations(model: "Classifier", data: "PictureData") -> None:
    """Let the rest of the model train and validate on activations from now on, where that can be and pays.

    They are found from an earlier run or computed, on all devices. Where they can't be had (a full disk, more than
    `data.cache_limit_gb`, a picture that can't be decoded), a line says why, and every epoch computes all.
    """
    if not pays(model, data):
        return
    parts = cut(model.network, model.frozen)
    if parts is None:
        log.info("what is frozen is computed anew in every epoch: %s can't be cut there", model.backbone)
        return
    frozen, rest = parts
    found: dict[str, Activations] = {}
    try:
        for split in ("train", "val"):
            if split in data.splits:
                found[split] = Activations(_rows(model, data, split, frozen), data.splits[split].labels)
    except Unavailable as error:
        if model.trainer.is_global_zero:
            log.warning("what is frozen is computed anew in every epoch: %s", error)
        return
    data.activations = found
    model.rest = rest.forward  # not the module: its weights are in the model already


def pays(model: Any, data: "PictureData") -> bool:
    """Return whether something is frozen, pictures come back unchanged, and a fit reads them more than once."""
    trainer = data.trainer
    if trainer is None or data.num_views is None or not getattr(model, "frozen", None) or is_sharded(trainer):
        return False
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    if trainer.max_steps != -1:
        batches = math.ceil(len(data.splits["train"].labels) / data.batch_size)
        epochs = min(epochs, trainer.max_steps * trainer.accumulate_grad_batches / batches)
    return data.cache_limit_gb > 0 and epochs > data.num_views


def _rows(model: "Classifier", data: "PictureData", split: str, frozen: nn.Module) -> Tensor:
    """Return the activations of a split, one row for each view of each picture."""
    trainer = model.trainer
    pictures = data.pictures(split, train=split == "train")
    first = _activations(model, frozen, Collate(data.image_size)([pictures[data.key(split, 0)]]))
    shape, dtype = (data.num_rows(split), *first.shape[1:]), first.dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    name = f"{Path(data.root or '').resolve().name}-{_key(model, data, split, frozen)[:16]}{ACTIVATIONS}"
    path = cache_dir() / name
    is_there = path.exists() and path.stat().st_size == num_bytes
    if not trainer.strategy.reduce_boolean_decision(is_there, all=True):
        began = time.perf_counter()
        temporary = path.with_name(f".{name}.{trainer.strategy.broadcast(os.urandom(4).hex())}.tmp")
        try:
            _in_step(model, lambda: _reserve(model, temporary, num_bytes, data.cache_limit_gb))
            rows = torch.from_file(str(temporary), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
            _in_step(model, lambda: _fill(model, data, split, frozen, rows))
            if trainer.local_rank == 0:
                temporary.replace(path)
            trainer.strategy.barrier()
        finally:
            if trainer.local_rank == 0:
                temporary.unlink(missing_ok=True)
        if trainer.is_global_zero:
            seconds = time.perf_counter() - began
            words = "computed what is frozen once, for %s pictures of %s in %.1f s: %.2f GB in %s"
            log.info(words, f"{shape[0]:,}", split, seconds, num_bytes / 1e9, path)
    mark_used(path)
    # A map of the file, which all processes share: it takes memory only as long as there is some to spare.
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def _in_step(model: "Classifier", act: Any) -> None:
    """Do what may fail on one device: then none goes on."""
    failure: Exception | None = None
    try:
        act()
    except (OSError, Unavailable) as error:
        failure = error
    if not model.trainer.strategy.reduce_boolean_decision(failure is None, all=True):
        message = failure.strerror if isinstance(failure, OSError) else failure
        raise Unavailable(message or "another process can't")


def _reserve(model: "Classifier", path: Path, num_bytes: int, limit_gb: float) -> None:
    if model.trainer.local_rank != 0:
        return
    limit = min(limit_gb * 1e9, room(path.parent))
    if num_bytes > limit:
        words = f"{num_bytes / 1e9:.2g} GB of activations would be above --data.cache_limit_gb or half the free disk"
        raise Unavailable(f"{words}, {limit / 1e9:.2g} GB")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        if hasattr(os, "posix_fallocate"):  # a disk that is full then says so here: at a write to the map it would kill
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        file.truncate(num_bytes)


def _fill(model: "Classifier", data: "PictureData", split: str, frozen: nn.Module, rows: Tensor) -> None:
    """Compute this device's part of a machine's activations."""
    part = share(len(rows), model.trainer.local_rank, model.trainer.num_devices)
    chosen = [part[i : i + _NUM_AT_ONCE] for i in range(0, len(part), _NUM_AT_ONCE)]
    batches = [[data.key(split, row) for row in batch] for batch in chosen]
    pictures = data.pictures(split, train=split == "train")
    options = data.worker_options(_NUM_AT_ONCE)
    loader = DataLoader(pictures, batch_sampler=batches, collate_fn=Collate(data.image_size), **options)
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


def _as_map(rows: Tensor) -> Tensor:
    return rows.permute(0, 3, 1, 2) if rows.ndim == 4 else rows  # (B, C, h, w) in channels_last order


def _key(model: "Classifier", data: "PictureData", split: str, frozen: nn.Module) -> str:
    """Return a hash of all that decides about the activations."""
    digest = hashlib.sha256()
    read: Any = data.splits[split].read
    if isinstance(read, GreyReader):
        digest.update(read.pixels.tobytes())
    else:
        digest.update(files_digest(getattr(read, "files", read).paths, data.root or "").encode())
    is_train = split == "train"
    pictures = data.pictures(split, is_train)
    # A transform's own words may leave out what it was told; evaluation has none but ours.
    settings = {**data.hparams, "root": None, "batch_size": None} if is_train else data.cache_size
    about = (split, pictures.seed * is_train, repr(pictures.transform), settings, model.trainer.precision)
    digest.update(repr((*about, model.device.type, str(torch.__version__), model.backbone)).encode())
    for tensor in (model.mean, model.std, *frozen.state_dict().values()):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
