"""`finetune benchmark`: images per second of a fit, and the share of waiting for data."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.distributed.child_command import start_command, wait_for
from finetune.fitting.build import closing, stopped_at_once
from finetune.fitting.decide import decide
from finetune.fitting.fit import build
from finetune.fitting.plan import start_ranks_with
from finetune.models.network_names import is_choice
from finetune.profiling.throughput import MeasurementDone, Recorder, scaling, text
from finetune.settings.layers import Layer, Layers
from finetune.settings.schema import BenchmarkSettings
from finetune.system.files import check_target, replace_text
from finetune.system.messages import WrongUsage


def benchmark(layers: Layers, typed: Sequence[str], began: float) -> None:
    """Measure the fit of a command line. It is stopped then, and only its caches stay.

    Args:
        layers: Who has set what.
        typed: The command line, with which the processes of other devices start.
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
            start_ranks_with(typed)
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
