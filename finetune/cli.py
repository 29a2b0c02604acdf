"""The command line: one table of Lightning's four commands (fit, validate, test, predict) and our own.

This module imports nothing heavy, so that `finetune --help` is fast.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from finetune import __version__
from finetune.commands.command_line import in_full_spelling, with_images
from finetune.commands.error_lines import bug_line, exit_code, find_interruption, one_line
from finetune.commands.fold_search import is_cross_validation
from finetune.commands.help_pages import help_page
from finetune.commands.options import WORDS
from finetune.distributed.ranks import drop_stale_ranks, end_with_rank_zero
from finetune.system import openmp
from finetune.system.interpreter import install_unraisable_hook, without_gc
from finetune.system.messages import did_you_mean, shown
from finetune.system.terminal import (
    colored,
    redirect_closed_outputs,
    replace_unencodable,
)

# command: text of `--help`; for our own commands also "module:function"
LIGHTNING = {
    "fit": "Train a classifier on labelled images, then test it",
    "validate": "Measure a checkpoint on the validation split",
    "test": "Measure a checkpoint on the test split",
    "predict": "Classify images with a checkpoint",
}
OWN = {
    "demo": (
        "finetune.demo.demo:demo",
        "Train, test and report offline on generated images, in minutes",
    ),
    "by-hand": (
        "finetune.commands.by_hand:by_hand",
        "Train LeNet on Fashion-MNIST by data parallelism by hand",
    ),
    "parity": (
        "finetune.commands.parity:parity",
        "Compare every kind of parallelism with one device",
    ),
    "benchmark": (
        "finetune.commands.benchmark:benchmark",
        "Measure a fit: images per second, and the share of waiting for data",
    ),
    "check": (
        "finetune.commands.check:check",
        "Find errors in labelled images before training",
    ),
    "backbones": (
        "finetune.commands.list_backbones:list_backbones",
        "List the networks of torchvision and timm with size and licence",
    ),
    "review": (
        "finetune.commands.review:review",
        "Correct labels on a page, the most doubtful ones first",
    ),
    "cache": (
        "finetune.commands.cache:cache",
        "List or remove the caches of decoded images",
    ),
    "export": (
        "finetune.commands.export:export",
        "Write a checkpoint as an ONNX or other file, verified against it",
    ),
    "report": (
        "finetune.commands.report:report",
        "Write the report of a run: result, classes, mistakes",
    ),
    "compare": (
        "finetune.commands.report:compare",
        "Compare two or more runs on one page",
    ),
    "runs": (
        "finetune.commands.runs:runs",
        "List the runs of a folder with accuracy and size, or delete some",
    ),
    "serve": (
        "finetune.commands.serve:serve",
        "Serve predictions over HTTP, with a page for people",
    ),
}

# headings of `finetune --help` and their commands
SECTIONS = {
    "prepare the images": ("check", "review"),
    "train": ("fit", "backbones", "benchmark"),
    "inspect the result": ("report", "compare", "runs", "validate", "test"),
    "use the model": ("predict", "export", "serve"),
    "try and verify": ("demo", "parity", "by-hand"),
    "clean up": ("cache",),
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
    before = _exit_at_signals()
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
            message = f"finetune: error: {shown(message)}"
        _print_error(message, code)
    finally:
        if has_failed and is_own and _has_nccl_group():
            _exit_without_peers(code)
        _destroy_process_group()
    sys.exit(code)


def _exit_at_signals() -> dict[int, Any]:
    """Install handlers that raise SystemExit at SIGTERM and SIGHUP; return the previous handlers."""
    # PID 1 of a container ignores signals without a handler. `nohup` ignores SIGHUP: that stays.
    signums = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    return {
        signum: signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
        for signum in signums
    }


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
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


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
    elif page := help_page(arguments):
        print(page)
    elif command in LIGHTNING:
        if undecodable := [
            argument
            for argument in arguments
            if argument.encode(errors="ignore").decode() != argument
        ]:
            raise ValueError(
                f"{os.fsencode(undecodable[0])!r} is not UTF-8, as configs and checkpoints are: rename it"
            )
        if command == "fit":
            openmp.sleep_soon()
        else:
            openmp.sleep_at_once()
        in_full = in_full_spelling(arguments)
        if command == "fit" and is_cross_validation(in_full):
            with _exit_at_signals_without_raising():
                from finetune.commands.cross_validation import fit_folds

            fit_folds(in_full, arguments, time.monotonic() if began is None else began)
            return
        with _exit_at_signals_without_raising():
            from finetune.commands.lightning_cli import run_lightning

        run_lightning(in_full, typed=arguments, began=began)
    elif command in OWN:
        run_own(command, arguments[1:])
    else:
        hint = did_you_mean(command, [*LIGHTNING, *OWN])
        print(f"finetune: error: there is no command {command!r}{hint}", file=sys.stderr)
        sys.exit(2)


def run_own(command: str, arguments: Sequence[str]) -> None:
    """Call one of our own commands. Its flags and help come from its signature and docstring."""
    from jsonargparse import auto_cli

    from finetune.commands.parser import OneLineErrorParser

    if command in WORDS:
        arguments = with_images(in_full_spelling([command, *arguments]))[1:]
    if command == "serve":
        openmp.sleep_at_once()
    module, _, name = OWN[command][0].partition(":")
    with _exit_at_signals_without_raising():
        function = getattr(importlib.import_module(module), name)
    # These parse their own arguments: `benchmark` has the flags of fit, the others take several folders.
    if command in ("backbones", "benchmark", "compare", "report", "runs"):
        function(arguments)
        return
    has_folder = command in ("check", "review")
    name = f"finetune {command}"
    auto_cli(
        function,
        args=list(arguments),
        prog=name,
        parser_class=OneLineErrorParser,
        as_positional=has_folder,
    )


@contextlib.contextmanager
def _exit_at_signals_without_raising() -> Iterator[None]:
    """Exit at a signal without raising an exception.

    During imports, libraries would swallow the exception or be left half imported.
    """
    signums = [
        s
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(s) != signal.SIG_IGN
    ]
    before = {
        signum: signal.signal(signum, lambda signum, _: os._exit(128 + signum))
        for signum in signums
    }
    try:
        with without_gc():
            yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _help() -> str:
    table = {**LIGHTNING, **{name: text for name, (_, text) in OWN.items()}}
    sections = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<10} {table[name]}" for name in names)])
        for title, names in SECTIONS.items()
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
