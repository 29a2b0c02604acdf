"""Callback that measures the costs of a fit, and ends it."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from finetune import lightning_private
from finetune.data.decode import DecodeError
from finetune.distributed.signals import install_stop_at_once
from finetune.profiling import step_timing
from finetune.profiling.recorder import MeasurementDone
from finetune.runs.deferred_checkpoints import copy_of, is_worth_deferring

_WARM_UP = 3  # untimed steps, in which libraries choose their kernels and workers read ahead
_FEWEST = 4  # timed steps, at least
_BETWEEN = 0.2  # default for the seconds between epochs, if no epoch has ended
_NUM_DECODED = 24  # images


class Costs(NamedTuple):
    """Seconds that the parts of a fit take on one of its devices.

    Attributes:
        start: For all that happens once before and in the first steps, such as compiling. It excludes the decoding for
            the image cache, which the fit finds complete.
        batch: To train on a full batch.
        evaluate: To validate or test an image.
        decode: To decode an image on one core.
        checkpoint: To write a checkpoint.
        size: Bytes of a checkpoint.
        copying: To copy a checkpoint in memory.
        between: Between two epochs, without validation and checkpoint.
    """

    start: float
    batch: float
    evaluate: float
    decode: float
    checkpoint: float
    size: int
    copying: float
    between: float


class Stopwatch(pl.Callback):
    """Measures the costs of a fit, and ends it with `MeasurementDone`.

    Args:
        seconds: Seconds in which steps are timed.
        most: Seconds since the start after which the measurement ends early if steps are slow. It has at least three
            steps.
        folder: Folder for a checkpoint.
    """

    def __init__(self, seconds: float, most: float, folder: str) -> None:
        self.seconds = seconds
        self.most = most
        self.folder = folder
        self.ends: list[float] = []
        self.sizes: list[int] = []  # images in each step
        self.is_first: list[bool] = []  # whether a step is the first of its epoch
        self.costs: Costs | None = None
        self.began = time.perf_counter()

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, but whose time is not counted."""

        def uncounted(**arguments: Any) -> Any:
            before = time.perf_counter()
            try:
                return function(**arguments)
            finally:
                self.began += time.perf_counter() - before

        return uncounted

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        install_stop_at_once()  # there is nothing to save

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Only in the warm-up and at the ends of an epoch: after every step, a GPU's queue would run empty.
        if (
            len(self.ends) <= _WARM_UP
            or batch_idx == 0
            or batch_idx + 2 >= trainer.num_training_batches
        ):
            step_timing.synchronize(pl_module.device)
        self.ends.append(time.perf_counter())
        self.is_first.append(batch_idx == 0)
        self.sizes.append(len(batch["image"]))
        last_untimed = self._last_untimed_step()
        if last_untimed is None:
            return
        step_timing.synchronize(pl_module.device)
        self.ends[-1] = time.perf_counter()
        self.costs = self._measure_costs(trainer, pl_module, last_untimed)
        raise MeasurementDone

    def _measure_costs(self, trainer: pl.Trainer, pl_module: Any, last_untimed: int) -> Costs:
        """Return the costs by the times of the steps so far, and measure the costs that are not part of a step.

        Args:
            trainer: The trainer.
            pl_module: The model.
            last_untimed: Index of the step after which steps are timed.
        """
        timed = slice(last_untimed, None)
        seconds, between = _batch_and_between(
            self.ends[timed], self.sizes[timed], self.is_first[timed]
        )
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        evaluate = _seconds_per_image(pl_module, trainer, max(1, *self.sizes), data.eval_image_size)
        decode = _decode_seconds(data)
        path = os.path.join(self.folder, "trial.ckpt")
        _, checkpoint = step_timing.clocked(lambda: trainer.save_checkpoint(path), pl_module.device)
        epochs = sum(self.is_first[1 : last_untimed + 1])
        # the time until the end of the warm-up, without what its steps and ends of epochs take later
        start = (
            self.ends[last_untimed] - self.began - (last_untimed + 1) * seconds - epochs * between
        )
        size = os.path.getsize(path)
        copying = (
            _copy_seconds(trainer, pl_module.device)
            if is_worth_deferring(checkpoint, size)
            else 0.0
        )
        return Costs(
            start=max(0.0, start),
            batch=seconds,
            evaluate=evaluate,
            decode=decode,
            checkpoint=checkpoint,
            size=size,
            copying=copying,
            between=between,
        )

    def _last_untimed_step(self) -> int | None:
        """Return the index of the step after which steps are timed; None while the measurement continues."""
        num = len(self.ends)
        now = self.ends[-1]
        if num > _WARM_UP + _FEWEST and now - self.ends[_WARM_UP] >= self.seconds:
            return _WARM_UP
        return 1 if 3 <= num <= _WARM_UP + _FEWEST and now - self.began >= self.most else None


def _copy_seconds(trainer: pl.Trainer, device: torch.device) -> float:
    """Return the seconds that it takes to copy a checkpoint; 0 if there is no memory for a copy."""
    with suppress(MemoryError, RuntimeError):
        return step_timing.clocked(
            lambda: copy_of(lightning_private.dump_checkpoint(trainer)), device
        )[1]
    return 0.0


def _batch_and_between(
    ends: list[float], sizes: list[int], is_first: list[bool]
) -> tuple[float, float]:
    """Return the seconds of a full batch, and those between two epochs.

    If no full batch follows another batch of the same epoch, the two cannot be separated. Then all time counts
    as the batch's.

    Args:
        ends: Times at which steps ended.
        sizes: Images in each step.
        is_first: Whether a step is the first of its epoch.
    """
    full = max(1, *sizes)
    taken = [later - earlier for earlier, later in pairwise(ends)]
    steps = [*zip(taken, sizes[1:], is_first[1:], strict=True)]
    within = [seconds for seconds, size, first in steps if not first and size == full]
    across = [seconds for seconds, size, first in steps if first and size == full]
    if not within:
        return sum(taken) / max(1, sum(sizes[1:])) * full, 0.0
    batch = fmean(within)
    return batch, max(0.0, fmean(across) - batch) if across else _BETWEEN


def _seconds_per_image(model: Any, trainer: pl.Trainer, num: int, side: int) -> float:
    """Return the seconds that the network takes to validate or test an image.

    Args:
        model: The model that is trained.
        trainer: Its trainer.
        num: Number of images in a full batch.
        side: Side of the images in evaluation, in pixels.
    """
    images = torch.zeros(num, 3, side, side, dtype=torch.uint8, device=model.device)

    def evaluate() -> Tensor:
        with trainer.precision_plugin.forward_context():
            return model(images)

    model.eval()
    with torch.no_grad():
        seconds = step_timing.timed(evaluate, model.device, 1)[0] / num
    model.train()
    return seconds


def _decode_seconds(data: Any) -> float:
    """Return the seconds that one core takes to decode a training image."""
    files = replace(data.splits["train"], cached=None)
    num = min(_NUM_DECODED, len(files))
    began = time.perf_counter()
    for i in range(num):
        with suppress(DecodeError):
            files.read(i)
    return (time.perf_counter() - began) / num
