"""`finetune benchmark`: images per second of a fit, and the share of waiting for data."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.profilers import Profiler

from finetune.distributed.child_command import start_command, wait_for
from finetune.fitting.build import closing, stopped_at_once
from finetune.fitting.decide import decide
from finetune.fitting.fit import build
from finetune.models.network_names import is_choice
from finetune.settings.layers import Layer, Layers
from finetune.settings.schema import BenchmarkSettings
from finetune.system.files import check_target, replace_text
from finetune.system.machine import num_cores, processor
from finetune.system.messages import WrongUsage

_WARM_UP = 4  # fewest steps before the first measurement
_SECONDS = 2.0  # approximate time of a measurement
_CHUNK = (3, 50)  # fewest and most timed steps of a measurement


def benchmark(layers: Layers, typed: Sequence[str], began: float) -> None:
    """Measure the fit of a command line. It is stopped then, and only its caches stay.

    Args:
        layers: Who has set what.
        typed: The command line, which is measured in subprocesses for other numbers of devices.
        began: `time.monotonic` when the command began.
    """
    settings = layers.parse(BenchmarkSettings)
    if settings.minutes is not None:
        raise WrongUsage("is for finetune fit: benchmark has no length", "minutes")
    if is_choice(settings.model.backbone):
        name = settings.model.backbone
        raise WrongUsage(
            f"{name} is for finetune fit: name the network to measure", "model.backbone"
        )
    if settings.output is not None:
        check_target(settings.output, "--out")
        Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    if settings.devices is None:
        with stopped_at_once(), tempfile.TemporaryDirectory(prefix="finetune-benchmark-") as folder:
            result = _measure(layers, settings, folder, began)
    else:
        numbers = [n.strip() for n in settings.devices.split(",")]
        if not all(number.isdigit() and int(number) for number in numbers):
            raise WrongUsage(f"takes numbers such as 1,2, not {settings.devices!r}", "devices")
        results = [_result_of_subprocess(number, typed) for number in numbers]
        result = {**results[0], "scaling": scaling(results)}
    if result:
        print(text(result), flush=True)
    if result and settings.output is not None:
        replace_text(Path(settings.output), json.dumps(result, indent=1) + "\n")


def _measure(
    layers: Layers, settings: BenchmarkSettings, folder: str, began: float
) -> dict[str, Any]:
    """Train until the measurement is complete; return the result, on other ranks than 0 an empty one."""
    of_fit = {
        **{"resume": False, "name": None, "report": False, "trainer.default_root_dir": folder},
        **{"trainer.logger": [], "trainer.limit_val_batches": 0},
    }
    parts = build(decide(layers.on_top(Layer("benchmark", "decided", of_fit)), "", began))
    if parts.model.is_solved:
        raise WrongUsage(
            "benchmark measures training steps, and --model.freeze backbone has none: omit it"
        )
    recorder = Recorder(settings.repeats)
    recorder.attach(parts.trainer)
    with closing(parts.trainer, parts.run):
        try:
            parts.trainer.fit(parts.model, datamodule=parts.data)
        except MeasurementDone:
            pass
        else:
            raise ValueError(recorder.too_short())
    return recorder.result(parts.trainer, parts.data) if parts.trainer.is_global_zero else {}


def _result_of_subprocess(devices: str, typed: Sequence[str]) -> dict[str, Any]:
    """Measure a number of devices in a subprocess, and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        # the last value of an option counts
        more = ["--devices=null", f"--trainer.devices={devices}", f"--output={output}"]
        if code := wait_for(start_command([*typed, *more], stdout=subprocess.DEVNULL)):
            sys.exit(code)  # the subprocess has printed the error
        return json.loads(output.read_text("utf-8"))


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
            _synchronize(pl_module.device)
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
        _synchronize(device)
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


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
