"""Callback and profiler that measure the steps of a fit and the parts of a step."""

import datetime
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.profilers import Profiler

from finetune.distributed.signals import install_stop_at_once
from finetune.profiling import step_timing
from finetune.profiling.step_timing import StepParts, synchronize
from finetune.system.machine import num_cores, processor

_WARM_UP = 4  # fewest steps before the first measurement
_SECONDS = 2.0  # approximate time of a measurement
_CHUNK = (3, 50)  # fewest and most timed steps of a measurement


class MeasurementDone(Exception):
    """Ends a fit after its last measurement."""


class DataWaitProfiler(Profiler):
    """Adds up the seconds in which training waits for its next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._since = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self._since


class Recorder(pl.Callback):
    """Measures a fit, and ends it with `MeasurementDone`.

    A measurement times some consecutive steps of the fit, after a warm-up. The parts of a step are measured only if
    there is one device: several devices would have to pause the fit at the same step.

    Args:
        repeats: Number of measurements.

    Attributes:
        parts: Seconds per batch of each part of a step, one number for each measurement.
        whole: Seconds per step of each measurement.
        waited: Share of the time of each measurement in which training waited for data.
        other: Seconds per step in another precision, by its name.
    """

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.waiting = DataWaitProfiler()
        self.parts: dict[str, list[float]] = {}
        self.whole: list[float] = []
        self.waited: list[float] = []
        self.other: dict[str, float] = {}
        self._step = 0
        self._chunk = 0
        self._batch_size = 0
        self._warm_up = _WARM_UP
        self._began = 0.0
        self._paused = 0.0

    def attach(self, trainer: pl.Trainer) -> None:
        """Add this callback to a trainer, and remove its checkpoint callbacks and progress bars."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [
            callback
            for callback in callbacks
            if not isinstance(callback, (Checkpoint, ProgressBar))
        ]
        callbacks.append(self)
        trainer.profiler = self.waiting  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # Stop at once at a signal: there is nothing to save, and Lightning's handlers would wait for other devices.
        install_stop_at_once()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._batch_size = min(data.batch_size, len(data.splits["train"]))
        # Workers read ahead while the parts are measured. The warm-up consumes these batches.
        self._warm_up = max(_WARM_UP, 2 * data.worker_options(1)["num_workers"] + 2)
        if trainer.world_size == 1:
            self.parts |= step_timing.reading(data, self._batch_size, self.repeats)
            if loading := step_timing.loading(data, self._batch_size, self.repeats):
                self.parts["load"] = loading

    def on_train_epoch_start(self, *_: Any) -> None:
        self._resume()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._pause(pl_module.device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._pause(pl_module.device)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._resume()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step += 1
        # The number of timed steps; 0 after the last step of the warm-up.
        timed = self._step - self._warm_up
        # The clock also starts one step earlier: the time of that step decides how many steps are timed.
        if timed < -1:
            return
        # Synchronize only before and after a measurement: within it, a GPU's queue must not run empty.
        if timed <= 0 or timed == self._chunk:
            synchronize(pl_module.device)
        if timed == 0 and self._chunk == 0:  # before the first measurement
            is_full = len(batch["label"]) == self._batch_size or trainer.world_size > 1
            if not is_full:  # the short last batch of an epoch: take the next one
                self._step -= 1
            else:
                self._prepare(trainer, pl_module, batch)
        if timed <= 0:
            self._began = time.perf_counter()
            self.waiting.seconds = 0.0
        elif timed == self._chunk:
            seconds = time.perf_counter() - self._began
            self.whole.append(seconds / self._chunk)
            self.waited.append(self.waiting.seconds / seconds)
            if len(self.whole) == self.repeats:
                raise MeasurementDone
            self._step = 0

    def _pause(self, device: torch.device) -> None:
        """Stop the clock during validation and between epochs."""
        synchronize(device)
        self._paused = time.perf_counter()

    def _resume(self) -> None:
        if self._paused:
            self._began += time.perf_counter() - self._paused
        self._paused = 0.0

    def _prepare(self, trainer: pl.Trainer, pl_module: Any, batch: Any) -> None:
        """Choose the number of steps of a measurement, and measure the parts that need a batch."""
        seconds = max(time.perf_counter() - self._began, 1e-6)
        self._chunk = trainer.strategy.broadcast(
            min(max(round(_SECONDS / seconds), _CHUNK[0]), _CHUNK[1])
        )
        # L-BFGS needs a closure, so the parts of its step cannot be measured one by one.
        if trainer.world_size > 1 or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
            return
        device = pl_module.device
        host = {name: batch[name].cpu() for name in ("image", "label")}
        if device.type != "cpu":
            host = {name: tensor.pin_memory() for name, tensor in host.items()}
            self.parts["transfer"] = step_timing.timed(
                lambda: [tensor.to(device, non_blocking=True) for tensor in host.values()],
                device,
                self.repeats,
            )
        parts = StepParts(pl_module, batch)
        self.parts |= parts.seconds(self.repeats)
        if str(trainer.precision) == "32-true":
            # with the options of Lightning's autocast
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                other = parts.seconds(self.repeats)
            self.other["bf16-mixed"] = sum(statistics.median(seconds) for seconds in other.values())

    def too_short(self) -> str:
        """Return the error message for a fit that ended before it was measured."""
        need = self._warm_up + max(self._chunk, _CHUNK[0])
        return (
            f"the fit ended after {len(self.whole)} of {self.repeats} measurements, of {need} steps each: raise "
            "--trainer.max_epochs, or lower --repeats"
        )

    def result(self, trainer: pl.Trainer, data: Any) -> dict[str, Any]:
        """Return the measurements as plain values. Seconds are per batch, one number for each measurement."""
        device = trainer.strategy.root_device
        is_cuda = device.type == "cuda"
        about = {
            "device": torch.cuda.get_device_name(device) if is_cuda else processor(),
            "device_type": device.type,
            "num_devices": trainer.world_size,
            "cores": num_cores(),
            "precision": str(trainer.precision),
            "batch_size": self._batch_size,
            "image_size": data.image_size,
            "num_workers": data.worker_options(1)["num_workers"],
            "cache": _cached(data),
            "compiled": bool(getattr(trainer.lightning_module, "is_compiled", False)),
            "torch": str(torch.__version__),
            "date": datetime.date.today().isoformat(),
        }
        seconds: dict[str, Sequence[float]] = {**self.parts, "whole": self.whole}
        return {
            "about": about,
            "seconds": seconds,
            "waited": self.waited,
            "other": self.other,
        }


def _cached(data: Any) -> str:
    """Return which form of the training images is cached."""
    return "pictures" if data.splits["train"].cached is not None else "nothing"
