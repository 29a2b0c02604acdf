"""`finetune.fit`: the command in Python, with the same arguments, defaults, files, checks and messages."""

import inspect
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, NoReturn

import numpy as np
import torch

from finetune.api.fitted_run import FittedRun
from finetune.api.program_process import (
    check_not_forked,
    needs_processes,
    preserved_process,
    run_plan,
)
from finetune.commands.error_lines import one_line
from finetune.commands.places import with_places
from finetune.distributed.signals import Interrupted, find_interruption, stop_at_once
from finetune.fitting.build import stopped_at_once
from finetune.fitting.decide import carry_out, decide
from finetune.fitting.evaluate import evaluate
from finetune.runs.result_file import read_result
from finetune.settings.fields import words_of
from finetune.settings.layers import Layer, Layers, read_config, read_values
from finetune.settings.schema import FitSettings
from finetune.system.messages import WrongUsage

_PID = os.getpid()
# Random number generators and signal handlers are shared by all threads.
_ONE_AT_A_TIME = threading.Lock()


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

    Arguments that are not passed have the value of the config, or else the default of the command. The run is that of
    the command with the same settings. The process is restored afterwards: random numbers, signal handlers, logging,
    warnings, environment. Fits in several threads take turns.

    With several devices, or with `folds` or `members`, the fit runs in subprocesses, and their output is shown.

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
        members: Number of networks that are trained one by one, and predict as an ensemble; from 2.
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
    began = time.monotonic()
    check_not_forked(_PID)
    parameters = inspect.signature(fit).parameters
    passed = {
        name: value for name, value in arguments.items() if value is not parameters[name].default
    }
    command = f"finetune.fit({', '.join(f'{name}={value!r}' for name, value in passed.items())})"
    for name in ("folder", "config", "options"):
        passed.pop(name, None)
    if "backbone" in passed and not isinstance(backbone, str):
        passed["backbone"] = ",".join(backbone or ())
    if isinstance(weights, Sequence) and not isinstance(weights, str):
        passed["weights"] = ",".join(map(os.fsdecode, weights))
    configs = () if config is None else (read_config("fit", os.fsdecode(config)),)
    values = _values("fit", passed, {} if options is None else options)
    layers = with_places(Layers("fit", (*configs, values)), _places(folder))

    def decide_and_fit() -> Path:
        plan = decide(layers, command, began)
        if plan.settings.num_fits > 1 or needs_processes(plan.settings.trainer):
            return run_plan(plan)
        # a signal must not end the program's process here
        return carry_out(plan, end=lambda code: stop_at_once(code - 128))

    return FittedRun(
        _run_here(decide_and_fit, "fit(…, resume=True) continues from its last checkpoint")
    )


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
    values: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
    values["devices"] = 1 if device.type == "cpu" else [device.index or 0]
    values["trainer.accelerator"] = "cpu" if device.type == "cpu" else "gpu"
    places = [os.fspath(checkpoint), *_places(folder)]
    layers = with_places(Layers("test", (_values("test", values, {}),)), places)

    def run() -> Path:
        path = evaluate(layers).path
        assert path is not None, "a test has a folder"
        return path

    return read_result(_run_here(run) / "test.json")


def _places(folder: object) -> list[str]:
    """Return the folder of images as a place of the command line."""
    if folder is None:
        return []
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"the folder of images is a path, not {folder!r}")
    return [os.fsdecode(folder)]


def _values(command: str, words: Mapping[str, Any], options: Mapping[str, Any]) -> Layer:
    """Return the layer of the arguments of a call, by short words and by full names.

    Raises:
        TypeError: The options have no names.
        WrongUsage: A setting is passed twice, does not exist, or has a wrong value.
    """
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            f"options maps full names to values, such as {{'data.val_fraction': 0.2}}, not {options!r}"
        )
    in_full = words_of(FitSettings)
    for name in words:
        full = in_full.get(name, name)
        if full in {in_full.get(other, other) for other in options}:
            raise WrongUsage(f"is set twice: as {name!r}, and in options", full)
    values = {name: _plain(value) for name, value in {**words, **options}.items()}
    return read_values(command, Layer("finetune", "python"), values)


def _plain(value: Any) -> Any:
    """Return a value of a program without paths and values of NumPy."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _run_here(command: Callable[[], Path], after_stop: str = "") -> Path:
    """Run a command in this process, restore the process, and return the folder of its run."""
    with _ONE_AT_A_TIME, preserved_process():
        try:
            with stopped_at_once():
                return command()
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


def _raise_in_one_line(error: Exception) -> NoReturn:
    """Raise an error with the message of one line that the command would print."""
    line = one_line(error)
    outer = error
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
