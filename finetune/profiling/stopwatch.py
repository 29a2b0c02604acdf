"""Times the parts of a fit from inside, and ends it."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from finetune import lightning_private
from finetune.distributed.signals import install_stop_at_once
from finetune.profiling import step_timing
from finetune.profiling.recorder import Measured
from finetune.runs.deferred_checkpoints import copy_of, is_worth_it

_WARM_UP = 3  # steps that are not timed: libraries choose their kernels, workers read ahead
_FEWEST = 4  # steps that are
_BETWEEN = 0.2  # seconds between epochs where none has ended
_NUM_DECODED = 24  # pictures


class Costs(NamedTuple):
    """Seconds that the parts of a fit take on one of its devices.

    Attributes:
        start: From its beginning until its steps take as long as the later ones, but for that time: compiling is in it.
            Making what is kept of the pictures is not: it lies there then.
        batch: Of training on a whole batch.
        evaluate: Of a picture of val or test.
        decode: Of a picture that is decoded, on one core.
        checkpoint: Of writing a checkpoint.
        size: Bytes of it.
        copying: Of copying one.
        between: Between two epochs, validation and checkpoint aside.
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
    """Ends a fit with `Measured` once its steps have been timed for some seconds.

    Args:
        seconds: So many.
        most: After so many it ends with the third step, if there are no more than a few.
        folder: Where a checkpoint is written.
    """

    def __init__(self, seconds: float, most: float, folder: str) -> None:
        self.seconds = seconds
        self.most = most
        self.folder = folder
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

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not after every step, or a GPU's queue would run empty: where a whole batch lies between two that are no such.
        if (
            len(self.ends) <= _WARM_UP
            or batch_idx == 0
            or batch_idx + 2 >= trainer.num_training_batches
        ):
            step_timing.synchronize(pl_module.device)
        self.ends.append(time.perf_counter())
        self.is_first.append(batch_idx == 0)
        self.sizes.append(len(batch["image"]))
        if (warm_up := self._warm_up()) is None:
            return
        step_timing.synchronize(pl_module.device)
        self.ends[-1] = time.perf_counter()
        timed = slice(warm_up, None)
        seconds, between = _batch_and_between(
            self.ends[timed], self.sizes[timed], self.is_first[timed]
        )
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        evaluate = _evaluating(pl_module, trainer, max(1, *self.sizes), data.eval_image_size)
        decode = sum(step_timing.reading(data, _NUM_DECODED, 1).get("decode", [])) / _NUM_DECODED
        path = os.path.join(self.folder, "trial.ckpt")
        _, checkpoint = step_timing.clocked(lambda: trainer.save_checkpoint(path), pl_module.device)
        epochs = sum(self.is_first[1 : warm_up + 1])
        start = self.ends[warm_up] - self.began - (warm_up + 1) * seconds - epochs * between
        size = os.path.getsize(path)
        copying = _copying(trainer, pl_module.device) if is_worth_it(checkpoint, size) else 0.0
        self.costs = Costs(
            max(0.0, start), seconds, evaluate, decode, checkpoint, size, copying, between
        )
        raise Measured

    def _warm_up(self) -> int | None:
        """Return how many steps lie before the first end of those that are timed; None where more are to come."""
        num, now = len(self.ends), self.ends[-1]
        if num > _WARM_UP + _FEWEST and now - self.ends[_WARM_UP] >= self.seconds:
            return _WARM_UP
        return 1 if 3 <= num <= _WARM_UP + _FEWEST and now - self.began >= self.most else None


def _copying(trainer: pl.Trainer, device: torch.device) -> float:
    """Return the seconds of copying a checkpoint, which is left out where there is no memory for it."""
    with suppress(MemoryError, RuntimeError):
        return step_timing.clocked(
            lambda: copy_of(lightning_private.dump_checkpoint(trainer)), device
        )[1]
    return 0.0


def _batch_and_between(
    ends: list[float], sizes: list[int], is_first: list[bool]
) -> tuple[float, float]:
    """Return the seconds of a whole batch, and those between two epochs.

    Where no whole batch comes after another of its epoch they are not told apart, and the batch has all.
    """
    whole = max(1, *sizes)
    taken = [later - earlier for earlier, later in pairwise(ends)]
    steps = [*zip(taken, sizes[1:], is_first[1:], strict=True)]
    within = [seconds for seconds, size, first in steps if not first and size == whole]
    across = [seconds for seconds, size, first in steps if first and size == whole]
    if not within:
        return sum(taken) / max(1, sum(sizes[1:])) * whole, 0.0
    batch = fmean(within)
    return batch, max(0.0, fmean(across) - batch) if across else _BETWEEN


def _evaluating(model: Any, trainer: pl.Trainer, num: int, side: int) -> float:
    """Return the seconds of a picture that is validated or tested.

    Args:
        model: What learns.
        trainer: Its.
        num: Of a whole batch.
        side: Of pictures in evaluation, in pixels.
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
