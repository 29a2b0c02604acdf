"""`finetune benchmark`: images per second of a fit, and the share of waiting for data."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningArgumentParser

from finetune.commands.lightning_cli import FinetuneCLI, run_lightning
from finetune.commands.parsed_line import format_line, parse_line
from finetune.models.candidates import is_choice
from finetune.profiling.recorder import MeasurementDone, Recorder
from finetune.profiling.summary import scaling, text
from finetune.system.files import check_target, replace_text
from finetune.system.messages import WrongUsage

# Flags of the comparison. The subprocess for each number of devices gets its own values.
_OF_COMPARISON = ("devices", "output")


class BenchmarkCLI(FinetuneCLI):
    """The command line of `finetune fit`. The fit is measured, then stopped; only its caches stay."""

    may_resume = False

    def __init__(
        self, arguments: Sequence[str], typed: Sequence[str] = (), began: float | None = None
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="finetune-benchmark-") as folder:
            self.folder = folder
            # The constructor of LightningCLI also runs the command.
            super().__init__(["fit", *arguments[1:]], typed, began)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.command = "benchmark"  # type: ignore[attr-defined]
            parser.description = (
                "Measures the images per second of a fit, with all its options. Only caches stay."
            )
            parser.usage = "finetune benchmark FOLDER [--repeats N] [--devices 1,2] [--out FILE] [options of fit]"
            parser.add_argument(
                "--repeats",
                type=int,
                default=5,
                help="Number of measurements, of two seconds each.",
            )
            parser.add_argument(
                "--devices",
                type=str | None,
                default=None,
                help="Numbers of devices to compare, such as 1,2.",
            )
            parser.add_argument(
                "--output", type=str | None, default=None, help="JSON file to write."
            )
        return parser

    def instantiate_classes(self) -> None:
        if self.config["fit"].minutes is not None:
            self.parser.error("--minutes is for finetune fit: benchmark has no length")
        backbone = self.config["fit"].model.backbone
        if is_choice(backbone):
            self.parser.error(
                f"--backbone {backbone} is for finetune fit: name the network to measure"
            )
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        config["default_root_dir"] = self.folder
        config["logger"] = None
        config["limit_val_batches"] = 0
        options = self.config["fit"]
        options.report = False
        if options.repeats < 1:
            self.parser.error(f"repeats must be at least 1, not {options.repeats}")
        if self.model.is_solved:
            raise WrongUsage(
                "benchmark measures training steps, and --model.freeze backbone has none: omit it"
            )
        self.recorder = Recorder(options.repeats)
        trainer = super().instantiate_trainer(**kwargs)
        self.recorder.attach(trainer)
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Train until the measurement is complete, and print the result."""
        kwargs.pop("ckpt_path")
        try:
            self.trainer.fit(**kwargs)
        except MeasurementDone:
            pass
        else:
            raise ValueError(self.recorder.too_short())
        if self.trainer.is_global_zero:
            result = self.recorder.result(self.trainer, self.datamodule)
            _print_result(result, self.config["fit"].output)


def benchmark(arguments: Sequence[str]) -> None:
    """Measure the fit of a command line.

    Args:
        arguments: The arguments after `benchmark`.
    """
    line = parse_line(arguments)
    devices = line.last("devices")
    output = line.last("output")
    if output is not None:
        check_target(output, "--out")
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    if devices is None or line.asks_for_help():
        run_lightning(["benchmark", *arguments], BenchmarkCLI)
        return
    numbers = [int(number) if number.strip().isdigit() else 0 for number in devices.split(",")]
    if not all(numbers):
        raise WrongUsage(f"--devices takes numbers such as 1,2, not {devices!r}")
    line.flags = [(name, value) for name, value in line.flags if name not in _OF_COMPARISON]
    rest = format_line("benchmark", line)[1:]
    results = [_result_of_subprocess(number, rest) for number in numbers]
    _print_result({**results[0], "scaling": scaling(results)}, output)


def _result_of_subprocess(devices: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure a number of devices in a subprocess, and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        more = ["--trainer.devices", str(devices), "--output", str(output)]
        command = [sys.executable, "-m", "finetune", "benchmark", *arguments, *more]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C, or a scheduler's SIGTERM: let the subprocess clean up
            process.terminate()
            process.wait()
            raise
        if code:
            sys.exit(code)  # the subprocess has printed the error
        return json.loads(output.read_text("utf-8"))


def _print_result(result: dict[str, Any], output: str | None) -> None:
    print(text(result), flush=True)
    if output is not None:
        replace_text(Path(output), json.dumps(result, indent=1) + "\n")
