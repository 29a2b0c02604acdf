"""The command line: finds the command, understands its options, and calls its function.

This module imports nothing heavy, so that `finetune --help` is fast.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.distributed.ranks import drop_stale_ranks, end_with_rank_zero
from finetune.system.interpreter import install_unraisable_hook, without_gc
from finetune.system.machine import sleep_at_once, sleep_soon
from finetune.system.messages import did_you_mean, shown
from finetune.system.terminal import (
    colored,
    redirect_closed_outputs,
    replace_unencodable,
)

# headings of `finetune --help`, and the commands below them
SECTIONS = {
    "prepare the images": {
        "check": "Find errors in labelled images before training",
        "review": "Correct labels on a page, the most doubtful ones first",
    },
    "train": {
        "fit": "Train a classifier on labelled images, then test it",
        "backbones": "List the networks of torchvision and timm with size and licence",
        "benchmark": "Measure a fit: images per second, and the share of waiting for data",
    },
    "inspect the result": {
        "report": "Write the report of a run: result, classes, mistakes",
        "compare": "Compare two or more runs on one page",
        "runs": "List the runs of a folder with accuracy and size, or delete some",
        "validate": "Measure a checkpoint on the validation split",
        "test": "Measure a checkpoint on the test split",
    },
    "use the model": {
        "predict": "Classify images with a checkpoint",
        "export": "Write a checkpoint as an ONNX or other file, verified against it",
        "serve": "Serve predictions over HTTP, with a page for people",
    },
    "try and verify": {
        "demo": "Train, test and report offline on generated images, in minutes",
        "parity": "Compare every kind of parallelism with one device",
        "by-hand": "Train LeNet on Fashion-MNIST by data parallelism by hand",
    },
    "clean up": {"cache": "List or remove the caches and copies of images"},
}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM, 129 after the terminal closed.
    A service that was stopped and has answered all accepted requests exits with 0.
    """
    began = time.monotonic()
    arguments = list(sys.argv[1:] if args is None else args)
    is_own = args is None  # the process runs only this command and ends with it
    code = 0
    has_failed = False
    before = _handle(lambda signum, _: sys.exit(128 + signum), signal.SIGTERM, signal.SIGHUP)
    if is_own:
        _set_up_process()
    try:
        _run_then_restore(arguments, began, before, is_own)
    except KeyboardInterrupt:
        code = 130
        has_failed = True
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        has_failed = code != 0
        raise
    except BaseException as raised:
        from finetune.commands.error_lines import bug_line, exit_code, find_interruption, one_line

        error = find_interruption(raised)
        code = exit_code(error)
        has_failed = True
        # the reader of the output, such as `head`, has exited
        if isinstance(error, BrokenPipeError) and redirect_closed_outputs():
            code = 141
            sys.exit(code)
        message = one_line(error, next(iter(arguments), "fit"))
        if message is None or os.environ.get("FINETUNE_DEBUG"):
            sys.excepthook(type(error), error, error.__traceback__)
        if message is None:
            message = bug_line(error)
        elif code <= 128:
            if _is_decided(arguments):
                from finetune.fitting.plan import answer

                answer(Path(arguments[2]), "error", message)
            message = f"finetune: error: {shown(message)}"
        _print_error(message, code)
    finally:
        if has_failed and is_own and _has_nccl_group():
            _exit_without_peers(code)
        _destroy_process_group()
    sys.exit(code)


def _is_decided(arguments: Sequence[str]) -> bool:
    """Return whether another process has started a fit by the file of its plan."""
    return len(arguments) == 3 and list(arguments[:2]) == ["fit", "--decided"]


def _handle(handler: Callable[[int, Any], Any], *signums: int) -> dict[int, Any]:
    """Install a handler of signals that are not ignored; return the previous handlers."""
    # PID 1 of a container ignores signals without a handler. `nohup` ignores SIGHUP: that stays.
    heard = [signum for signum in signums if signal.getsignal(signum) != signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in heard}


def _restore(handlers: dict[int, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def _run_then_restore(
    arguments: Sequence[str], began: float, handlers: dict[int, Any], is_own: bool
) -> None:
    """Run a command, then restore the previous signal handlers."""
    try:
        run(arguments, began)
        if sys.stdout is not None:  # it is None if a daemon has closed it
            sys.stdout.flush()
    finally:
        # Only short work is left: a second Ctrl-C ends it at once, and exiting workers are not reported.
        if is_own:
            handlers = handlers | {signal.SIGINT: signal.SIG_DFL, signal.SIGCHLD: signal.SIG_DFL}
        _restore(handlers)


def _set_up_process() -> None:
    drop_stale_ranks()
    replace_unencodable()
    install_unraisable_hook()
    end_with_rank_zero()


def _print_error(message: str, code: int) -> None:
    """Print an error in one line; if a signal has stopped the command, only rank 0 prints."""
    if code < 128 or _is_rank_zero():
        redirect_closed_outputs()
        print(colored(message, "red", sys.stderr), file=sys.stderr)


def run(arguments: Sequence[str], began: float | None = None) -> None:
    """Run a command.

    Args:
        arguments: The command and its arguments.
        began: `time.monotonic` when the process started.
    """
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_help())
    elif command in ("-V", "--version", "version"):
        print(f"finetune {__version__}")
    elif _is_decided(arguments):
        sleep_soon()
        _import("finetune.fitting.decide:run_decided")(arguments[2])
    elif any(command in commands for commands in SECTIONS.values()):
        num_words = 2 if list(arguments[:2]) == ["runs", "rm"] else 1
        command = " ".join(arguments[:num_words])
        _run_command(command, arguments[num_words:], time.monotonic() if began is None else began)
    else:
        hint = did_you_mean(command, [name for commands in SECTIONS.values() for name in commands])
        print(f"finetune: error: there is no command {command!r}{hint}", file=sys.stderr)
        sys.exit(2)


def _run_command(command: str, arguments: Sequence[str], began: float) -> None:
    """Understand the options of a command, and call its function or print what they ask for."""
    # imported here, so that the list of commands is shown without them
    from finetune.settings.all_commands import COMMANDS
    from finetune.settings.layers import split_line

    line = split_line(command, arguments)
    if line.asks in ("help", "all"):
        from finetune.settings.pages import all_options_page, help_page

        print((help_page if line.asks == "help" else all_options_page)(command))
        return
    if undecodable := [text for text in arguments if text.encode(errors="ignore").decode() != text]:
        raise ValueError(
            f"{os.fsencode(undecodable[0])!r} is not UTF-8, as configs and checkpoints are: rename it"
        )
    layers = line.layers()
    # a wrong value is a line before this is imported
    from finetune.commands.places import with_places

    is_printed = line.asks == "config"
    layers = with_places(layers, line.places, is_printed)
    settings = layers.parse(layers.kind)
    if is_printed:
        print(layers.printed(), end="")
        return
    if command in ("fit", "benchmark"):
        sleep_soon()
    else:
        sleep_at_once()
    function = _import(COMMANDS[command].function)
    if line.has_configs:
        function(layers, [command, *arguments], began)
    elif command in ("review", "serve"):
        # there is nothing to save until they have handlers of their own
        with _exit_at_signals_without_raising():
            function(settings)
    else:
        function(settings)


def _import(function: str) -> Any:
    """Return the function of a `module:name`, whose import may take seconds."""
    module, _, name = function.partition(":")
    with _exit_at_signals_without_raising(), without_gc():
        return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def _exit_at_signals_without_raising() -> Iterator[None]:
    """Exit at a signal without raising an exception, and without Python's clean-up, which may take seconds.

    During imports, libraries would swallow the exception or be left half imported.
    """
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = _handle(lambda signum, _: os._exit(128 + signum), *signums)
    try:
        yield
    finally:
        _restore(before)


def _help() -> str:
    sections = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<10} {text}" for name, text in commands.items())])
        for title, commands in SECTIONS.items()
    )
    return f"""usage: finetune COMMAND [options]

Turns labelled images into a classifier, the same on any number of devices.

{sections}

  finetune COMMAND --help    the options of a command
  finetune --version         the version

for example:
  finetune fit FOLDER --epochs 10
  finetune fit --config hotdog.yaml
  finetune predict runs/fit/version_0 IMAGES"""


def _is_rank_zero() -> bool:
    # imports torch, which a process that a signal has stopped has imported already
    from finetune.distributed.signals import is_rank_zero

    return is_rank_zero()


def _has_nccl_group() -> bool:
    """Return whether this process is in an NCCL group.

    Destroying an NCCL group blocks until all ranks do the same, which a failed rank cannot rely on.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_backend() == "nccl"


def _exit_without_peers(code: int) -> None:
    """Exit at once, without waiting for other ranks and without Python's clean-up."""
    if loader := sys.modules.get("finetune.data.loader"):
        loader.end_workers()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _destroy_process_group() -> None:
    # After an error, other ranks wait for this one until it leaves the process group.
    if loader := sys.modules.get("finetune.data.loader"):
        loader.end_workers()
    # Without this a gloo rank sometimes aborts at exit ("terminate called without an active exception").
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        # The trainer is in a reference cycle and holds process groups, whose threads end when it is collected.
        gc.collect()
