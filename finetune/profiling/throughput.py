"""`finetune benchmark`: images per second of a fit, the share of waiting for data, and both as text."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.profilers import Profiler

from finetune.distributed.signals import install_stop_at_once
from finetune.system.machine import num_cores, processor

_WARM_UP = 4  # fewest steps before the first measurement
_SECONDS = 2.0  # approximate time of a measurement
_CHUNK = (3, 50)  # fewest and most timed steps of a measurement


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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

    A measurement times some consecutive steps of the fit, after a warm-up.

    Args:
        repeats: Number of measurements.

    Attributes:
        whole: Seconds per step of each measurement.
        waited: Share of the time of each measurement in which training waited for data.
    """

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.waiting = DataWaitProfiler()
        self.whole: list[float] = []
        self.waited: list[float] = []
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
        # the warm-up consumes the batches that workers have read ahead
        self._warm_up = max(_WARM_UP, 2 * data.worker_options(1)["num_workers"] + 2)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._resume()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._pause(pl_module.device)

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
            seconds = max(time.perf_counter() - self._began, 1e-6)
            num = min(max(round(_SECONDS / seconds), _CHUNK[0]), _CHUNK[1])
            self._chunk = trainer.strategy.broadcast(num)
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
        """Stop the clock between epochs."""
        synchronize(device)
        self._paused = time.perf_counter()

    def _resume(self) -> None:
        if self._paused:
            self._began += time.perf_counter() - self._paused
        self._paused = 0.0

    def too_short(self) -> str:
        """Return the error message for a fit that ended before it was measured."""
        need = self._warm_up + max(self._chunk, _CHUNK[0])
        return (
            f"the fit ended after {len(self.whole)} of {self.repeats} measurements, of {need} steps each: raise "
            "--trainer.max_epochs, or lower --repeats"
        )

    def result(self, trainer: pl.Trainer, data: Any) -> dict[str, Any]:
        """Return the measurements as plain values: seconds per batch, and the share of waiting, of each measurement."""
        device = trainer.strategy.root_device
        is_cuda = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if is_cuda else processor(),
            "device_type": device.type,
            "num_devices": trainer.world_size,
            "cores": num_cores(),
            "precision": str(trainer.precision),
            "batch_size": self._batch_size,
            "image_size": data.image_size,
            "num_workers": data.worker_options(1)["num_workers"],
            "seconds": self.whole,
            "waited": self.waited,
        }


def text(result: dict[str, Any]) -> str:
    """Return a result of `Recorder.result` as text: medians, with the smallest and largest measurement."""
    is_cpu = result["device_type"] == "cpu"
    cores = f" ({result['cores']} cores)" if is_cpu else ""
    workers = f"{result['num_workers']} worker" + "s" * (result["num_workers"] != 1)
    rates = [result["batch_size"] / seconds for seconds in result["seconds"]]
    waited = [100 * share for share in result["waited"]]
    lines = [
        f"{result['num_devices']} × {result['device']}{cores}",
        f"{result['precision']}, batch {result['batch_size']} at {result['image_size']} pixels, {workers}",
        f"{_median(rates, '.0f')} images/s, n = {len(rates)}",
        f"waiting for data: {_median(waited, '.1f')} % of the time",
    ]
    for row in result.get("scaling", []):
        devices = f"{row['devices']} device{'s' * (row['devices'] > 1)}"
        lines.append(
            f"{devices}: {row['rate']:,.0f} images/s, {row['speed_up']:.2f} times 1, efficiency "
            f"{100 * row['efficiency']:.0f} %" + (" of the shared cores" if is_cpu else "")
        )
    return "\n".join(lines)


def scaling(results: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return rate, speed-up and efficiency for each number of devices, relative to the first result.

    Processes on a CPU share its cores. There an efficiency of 1 means as fast as the first result.
    """
    rates = [result["batch_size"] / statistics.median(result["seconds"]) for result in results]
    base = rates[0] / results[0]["num_devices"]
    rows = []
    for rate, result in zip(rates, results, strict=True):
        num = result["num_devices"]
        ideal = rates[0] if result["device_type"] == "cpu" else base * num
        rows.append(
            {"devices": num, "rate": rate, "speed_up": rate / base, "efficiency": rate / ideal}
        )
    return rows


def _median(values: Sequence[float], form: str) -> str:
    least = min(values)
    most = max(values)
    return f"{statistics.median(values):,{form}} ({least:,{form}} to {most:,{form}})"
