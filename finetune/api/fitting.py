"""`finetune.fit`: the command in Python, with the same arguments, defaults, files, checks and messages."""

import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, NoReturn

import torch
from pytorch_lightning import Trainer

from finetune.api.borrowed_process import check_not_forked, preserved_process
from finetune.api.child_process import needs_processes, run_command
from finetune.api.command_words import command_line, passed_arguments, with_hints
from finetune.api.fitted_run import FittedRun
from finetune.commands.command_line import in_full_spelling
from finetune.commands.error_lines import one_line, unwrap
from finetune.commands.fold_search import is_cross_validation
from finetune.commands.lightning_cli import FinetuneCLI, OneLineErrorLightningParser, run_lightning
from finetune.commands.parser import explain
from finetune.distributed.signals import Interrupted, find_interruption, stop_at_once
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.result_file import read_result
from finetune.system.messages import WrongUsage

_PID = os.getpid()
# Random number generators and signal handlers are shared by all threads.
_ONE_AT_A_TIME = threading.Lock()


@with_hints
def fit(  # noqa: PLR0913 (an argument for each option)
    folder: str | os.PathLike[str] | None = None,
    *,
    epochs: int | None = None,
    minutes: float | None = None,
    patience: int | None = None,
    lr: float | None = None,
    optimizer: str | None = None,
    size: int | None = None,
    batch: int | None = None,
    workers: int | str | None = None,
    backbone: str | Sequence[str] | None = None,
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | EllipsisType | None = ...,
    freeze: str | EllipsisType | None = ...,
    members: int | None = None,
    class_weights: str | os.PathLike[str] | Mapping[str, float] | None = None,
    folds: int | None = None,
    devices: int | str | None = None,
    precision: str | None = None,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    logger: str | None = None,
    config: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] = False,
    options: Mapping[str, Any] | None = None,
) -> FittedRun:
    """Train a classifier on a folder of labelled images, then test the best checkpoint: `finetune fit` in Python.

    Arguments that are not passed have the value of the config, or else the default of the command. The run is the same
    as that of the command, which its about.json states. The process is restored afterwards: random numbers, signal
    handlers, logging, warnings, environment. Fits in several threads take turns.

    With several devices, or with `folds`, the fit runs in subprocesses, as `finetune fit`, and their output is shown.

    Args:
        folder: Images in `train/CLASS/*`, or class folders alone; None if a config or `options` names the data.
        epochs: How often training sees each image; without it 5 to 50 times, more often if there are fewer images.
        minutes: Instead of `epochs`: train for about this many minutes, testing included.
        patience: Stop after this many validations without a higher accuracy.
        lr: Learning rate; a config's `head_lr_multiplier` multiplies it for the head.
        optimizer: The name of one of torch's.
        size: Side in pixels of the network's input.
        batch: Images per batch, over all devices together.
        workers: Processes per device that read images, or `auto`.
        backbone: A torchvision network, such as resnet50, or timm's, such as timm/convnext_nano. With several, or
            `auto` for a short list of our own, the one that suits the images best is chosen first.
        weights: Initial weights: a name of torchvision's, a file, a run, or a folder of timm's; None for random
            weights. With `backbone="auto"` also several, to choose from: runs or folders of timm's.
        freeze: The last frozen stage, such as layer2; None for nothing. With `backbone` the head is solved exactly, as
            a logistic regression: `epochs`, `minutes` and `lr` then have no effect.
        members: Number of networks that are trained independently and predict as an ensemble.
        class_weights: `balanced`; weights of classes such as `{"cat": 2}`, where others have 1; or a .yaml file.
        folds: Number of folds of a cross-validation. Each is a fit in a subprocess, tested on another part of the
            images. The result is over all images, and `best` joins the networks of all folds.
        devices: Their number, or which ones.
        precision: Such as bf16-mixed or 32-true.
        seed: Seed of order, augmentation and new weights.
        out: Folder of runs; this one is in `fit/version_N` below it.
        logger: Where metrics are also logged: tensorboard, wandb or mlflow, or several, such as "wandb,mlflow".
        config: A .yaml file, or the name of one that is shipped.
        resume: Continue the newest run of the same data and network beneath `out`, or start a new one if there is none;
            or the folder of the run to continue. A run keeps the settings that are not passed.
        options: Full names of the command's other options (`finetune fit --help all`) and their values, such as
            `{"data.val_fraction": 0.2, "threshold": "recall:0.95"}`.

    Raises:
        ValueError: The error message of the command, in one line.
        FileNotFoundError: The same, about a file or folder that does not exist.
        KeyboardInterrupt: Ctrl-C, after a checkpoint is saved: `resume=True` continues. A second one stops at once.
    """
    arguments = dict(locals())  # before any other name is local: all arguments by name
    check_not_forked(_PID)
    words = passed_arguments(fit, arguments)
    for name in ("folder", "options"):
        words.pop(name, None)
    if "backbone" in words and not isinstance(backbone, str):
        words["backbone"] = ",".join(backbone or ())
    if isinstance(weights, Sequence) and not isinstance(weights, str):
        words["weights"] = ",".join(map(os.fsdecode, weights))
    line = command_line(folder, words, options or {})
    return FittedRun(_run_here(line, "fit(…, resume=True) continues from its last checkpoint"))


def run_test(
    checkpoint: Path,
    folder: str | os.PathLike[str] | None,
    device: torch.device,
    words: Mapping[str, Any],
) -> dict[str, Any]:
    """Run `finetune test` in this process: see `LoadedModel.test`.

    Args:
        checkpoint: A checkpoint of `finetune fit`, or an exported file.
        folder: Folder of the data; None for that of the checkpoint.
        device: The device to compute on.
        words: Short words of the command and their values; those that are None are omitted.

    Returns:
        The content of test.json.
    """
    check_not_forked(_PID)
    options: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
    options["devices"] = 1 if device.type == "cpu" else [device.index or 0]
    options["trainer.accelerator"] = "cpu" if device.type == "cpu" else "gpu"
    arguments = command_line(folder, options, {}, command="test")
    # An absolute path begins with no dash, which would be an option.
    arguments.insert(1, os.path.abspath(checkpoint))
    return read_result(_run_here(arguments) / "test.json")


def _run_here(arguments: list[str], after_stop: str = "") -> Path:
    """Run a command in this process, restore the process, and return the folder of its run."""
    with _ONE_AT_A_TIME, preserved_process():
        try:
            return Path(_run(arguments))
        except BaseException as error:
            if isinstance(stop := find_interruption(error), Interrupted):
                interrupted = stop.exit_code - 128
            elif isinstance(error, Exception):
                _raise_in_one_line(error)
            else:
                raise
    # Outside of the block above, so that the program's own handlers are restored.
    if interrupted != signal.SIGINT:
        # A program without a handler ends here, as it would have without a fit.
        signal.raise_signal(interrupted)
        raise SystemExit(128 + interrupted)
    raise KeyboardInterrupt("; ".join(filter(None, ("stopped by Ctrl-C", after_stop))))


class _Refused(SystemExit):
    """An error of the parser.

    It is a SystemExit: jsonargparse treats other exceptions as a value of the wrong type and tries the next type.
    """


class _Parser(OneLineErrorLightningParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise _Refused(explain(self, message))


class _NeedsProcesses(Exception):
    pass


class _InProcessCLI(FinetuneCLI):
    """The command line interface in the process of a program."""

    kind_of_parser = _Parser

    def before_instantiate_classes(self) -> None:
        trainer = self.config[self.requested_subcommand].trainer
        if needs_processes(
            trainer.devices, trainer.num_nodes, trainer.accelerator, trainer.strategy
        ):
            raise _NeedsProcesses

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Checkpoints):
                # a signal must not end the program's process here
                callback.signal.end = lambda code: stop_at_once(code - 128)
        return trainer


def _run(arguments: list[str]) -> str | os.PathLike[str]:
    try:
        in_full = in_full_spelling(arguments)
        if in_full[0] == "fit" and is_cross_validation(in_full):
            return run_command(arguments)
        with torch.inference_mode(False):
            path = run_lightning(in_full, _InProcessCLI, typed=arguments).run.path
        assert path is not None, "a fit that has ended has a folder"
        return path
    except _NeedsProcesses:
        return run_command(arguments)
    except _Refused as refused:
        raise WrongUsage(str(refused)) from None


def _raise_in_one_line(error: Exception) -> NoReturn:
    """Raise an error with the message of one line that the command would print."""
    line = one_line(error)
    outer = error
    error = unwrap(error)  # type: ignore[assignment]
    kinds: tuple[type[Exception], ...] = (
        FileNotFoundError,
        PermissionError,
        OSError,
        WrongUsage,
        ValueError,
    )
    kind = next((kind for kind in kinds if isinstance(error, kind)), None)
    if line is None or (kind is not None and str(error) == line):
        raise error
    if line.startswith("out of"):
        # A notebook keeps the last error. Its frames hold the tensors that have filled the memory.
        _clear_frames(outer)
        raise MemoryError(line) from None
    raise (kind or ValueError)(line) from error


def _clear_frames(error: BaseException) -> None:
    """Release the local variables of the frames in an error's traceback, and in those of its causes."""
    waiting = [error]
    cleared: list[BaseException] = []
    while waiting:
        link = waiting.pop()
        traceback.clear_frames(link.__traceback__)
        cleared.append(link)
        for other in (link.__cause__, link.__context__):
            if other is not None and other not in cleared:
                waiting.append(other)
