"""What a fit costs on this machine: some of its steps, on its own pictures, timed and given up."""

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator
from torch import Tensor

from finetune.data.datamodule import ImageDataModule
from finetune.data.loader import end_workers
from finetune.distributed.launch import count
from finetune.distributed.signals import install_stop_at_once
from finetune.profiling import step_timing
from finetune.profiling.recorder import Measured
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.system.machine import num_cores
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit

_WARM_UP = 3  # steps that are not timed: libraries choose their kernels, workers read ahead
_FEWEST = 4  # steps that are
_BETWEEN = 0.2  # seconds between epochs where a trial has seen none
_NUM_DECODED = 24  # pictures


class Costs(NamedTuple):
    """Seconds that the parts of a fit take.

    Attributes:
        start: From its beginning until its steps take as long as the later ones, but for that time: compiling is in it.
            Decoding what is kept of the pictures is not: it lies there then.
        batch: Of training on a whole batch.
        evaluate: Of a picture that is evaluated.
        decode: Of a picture that is decoded, on one core.
        checkpoint: Of writing a checkpoint.
        between: Between two epochs, validation and checkpoint aside.
    """

    start: float
    batch: float
    evaluate: float
    decode: float
    checkpoint: float
    between: float


class _Stopwatch(pl.Callback):
    """Ends a fit with `Measured` once its steps have been timed for some seconds."""

    def __init__(self, seconds: float, most: float, folder: str) -> None:
        self.seconds, self.most, self.folder = seconds, most, folder
        self.ends: list[float] = []
        self.sizes: list[int] = []  # pictures
        self.is_first: list[bool] = []  # of an epoch
        self.costs: Costs | None = None
        self.began = time.perf_counter()

    def paused(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function whose seconds don't count."""

        def uncounted() -> Any:
            before = time.perf_counter()
            try:
                return function()
            finally:
                self.began += time.perf_counter() - before

        return uncounted

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        install_stop_at_once()  # there is nothing to save

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step_timing.synchronize(pl_module.device)
        self.ends.append(time.perf_counter())
        self.is_first.append(batch_idx == 0)
        self.sizes.append(len(batch["image"]))
        if (warm_up := self._warm_up()) is None:
            return
        timed = slice(warm_up, None)
        batch_seconds, between = _batch_and_between(self.ends[timed], self.sizes[timed], self.is_first[timed])
        evaluate = _evaluating(pl_module, trainer, batch["image"])
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        decode = sum(step_timing.reading(data, _NUM_DECODED, 1).get("decode", [])) / _NUM_DECODED
        _, checkpoint = step_timing.clocked(
            lambda: trainer.save_checkpoint(os.path.join(self.folder, "trial.ckpt")), pl_module.device
        )
        epochs = sum(self.is_first[1 : warm_up + 1])
        start = self.ends[warm_up] - self.began - (warm_up + 1) * batch_seconds - epochs * between
        self.costs = Costs(max(0.0, start), batch_seconds, evaluate, decode, checkpoint, between)
        raise Measured

    def _warm_up(self) -> int | None:
        """Return how many of the steps are not to be timed; None where more are to come."""
        num, now = len(self.ends), self.ends[-1]
        if num > _WARM_UP + _FEWEST and now - self.ends[_WARM_UP] >= self.seconds:
            return _WARM_UP
        return 1 if 3 <= num <= _WARM_UP + _FEWEST and now - self.began >= self.most else None


def _batch_and_between(ends: list[float], sizes: list[int], is_first: list[bool]) -> tuple[float, float]:
    """Return the seconds of a whole batch, and those between two epochs; of one batch each they are not told apart."""
    steps = [*zip(pairwise(ends), sizes[1:], is_first[1:], strict=True)]
    within = [(later - earlier, size) for (earlier, later), size, first in steps if not first and size]
    across = [later - earlier for (earlier, later), _, first in steps if first]
    if not within:
        return fmean(later - earlier for (earlier, later), *_ in steps), 0.0
    seconds, pictures = map(sum, zip(*within, strict=True))
    batch = seconds / pictures * max(sizes)  # the last of an epoch may have fewer
    return batch, max(0.0, fmean(across) - batch) if across else _BETWEEN


def _evaluating(model: Any, trainer: pl.Trainer, images: Tensor) -> float:
    """Return the seconds of one of the pictures when they are evaluated."""

    def evaluate() -> Tensor:
        with trainer.precision_plugin.forward_context():
            return model(images)

    if len(images) == 0:
        return 0.0
    model.eval()
    with torch.no_grad():
        seconds = step_timing.timed(evaluate, model.device, 1)[0]
    model.train()
    return seconds / len(images)


def trial(model: Classifier, data: ImageDataModule, trainer: Any, seconds: float, most: float = math.inf) -> Costs:
    """Return what the parts of a fit take on one of its devices.

    Args:
        model: Used up by it: its weights are others afterwards.
        data: The pictures; of its batch the trial takes a device's share.
        trainer: `accelerator`, `precision`, `devices`, `accumulate_grad_batches` and `default_root_dir` of the fit.
        seconds: For how long steps are timed.
        most: How long the trial's steps may take; then one that is not timed and one that is must do.
    """
    num_devices = _num_devices(trainer["accelerator"], trainer["devices"])
    with _folder(trainer["default_root_dir"]) as folder, _cores(num_devices), _untold():
        stopwatch = _Stopwatch(seconds, most, folder)
        fit = pl.Trainer(
            accelerator=trainer["accelerator"],
            devices=1,
            precision=trainer["precision"],
            accumulate_grad_batches=trainer["accumulate_grad_batches"],
            max_epochs=10**6,  # so many that what is kept of the pictures is made, as in a fit of several
            limit_val_batches=0,
            callbacks=[stopwatch],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            plugins=[AtomicCheckpointIO()],
        )
        check_fit(fit, model, data)
        data.train_dataloader = stopwatch.paused(data.train_dataloader)  # type: ignore[method-assign]
        # A last batch of one picture, as a device's share alone may leave, is none for batch norm.
        data.batch_size = min(data.batch_size, max(2, math.ceil(data.batch_size / num_devices)))
        num = len(data.splits["train"].labels)
        fit.limit_train_batches = max(1, num // data.batch_size) if num_devices > 1 else 1.0
        try:
            fit.fit(model, datamodule=data)
        except Measured:
            pass
        finally:
            end_workers()
    assert stopwatch.costs is not None, "a fit of a million epochs ends in no other way"
    return stopwatch.costs


def starting(trainer: Any, seconds: float, is_tested: bool) -> float:
    """Return the seconds until the processes of a fit's other devices are there.

    Args:
        trainer: `accelerator`, `devices` and `strategy` of the fit.
        seconds: What this process took from its beginning until now: they do the same, unless they are forked.
        is_tested: Whether a test follows, for which processes are spawned anew.
    """
    strategy = str(trainer["strategy"])
    if _num_devices(trainer["accelerator"], trainer["devices"]) == 1 or "fork" in strategy:
        return 0.0
    return seconds * (2 if "spawn" in strategy and is_tested else 1)


def _folder(root: Any) -> tempfile.TemporaryDirectory[str]:
    """Return a folder where the fit's will be, or as near above it as is there: on the disk that it will write to."""
    path = Path(root).absolute()
    place = next(place for place in (path, *path.parents) if place.is_dir())
    try:
        return tempfile.TemporaryDirectory(prefix=".finetune-trial-", dir=place)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"nothing can be written in {place}: {reason}; --out names another folder for runs") from error


@contextmanager
def _untold() -> Iterator[None]:
    """Keep to ourselves what the fit will say again; what is computed once for both, the trial alone can tell."""
    log = logging.getLogger("finetune.training"), logging.getLogger("finetune.features.linear_probe")
    before = [one.level for one in log]
    for one in log:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(log, before, strict=True):
            one.setLevel(level)


def _num_devices(accelerator: Any, devices: Any) -> int:
    """Return how many devices of this machine the fit will have."""
    is_cuda = accelerator in ("auto", "gpu", "cuda") or isinstance(accelerator, CUDAAccelerator)
    return count(devices) or (torch.cuda.device_count() if is_cuda else 0) or 1


@contextmanager
def _cores(num_devices: int) -> Iterator[None]:
    """Leave a device's share of the cores to torch, as Lightning does where it starts several processes."""
    before = torch.get_num_threads()
    if num_devices > 1:
        torch.set_num_threads(max(1, num_cores() // num_devices))
    try:
        yield
    finally:
        torch.set_num_threads(before)
