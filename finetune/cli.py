"""The command line: Lightning's fit, validate, test and predict beside our own commands, in one table.

This module imports nothing heavy, so that `finetune --help` answers at once.
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
from finetune.commands.command_line import in_full_spelling, with_pictures
from finetune.commands.error_lines import exit_code, find_interruption, one_line
from finetune.commands.help_pages import help_page
from finetune.commands.options import WORDS
from finetune.distributed.ranks import drop_stale_ranks, end_with_rank_zero
from finetune.system.messages import did_you_mean, shown
from finetune.system.quick_process import (
    end_with,
    freeze_imported,
    import_torchmetrics,
    mark_own_process,
    without_gc,
)
from finetune.system.terminal import outlive_terminal, redirect_closed_outputs
from finetune.system.unraisable_hook import install_unraisable_hook
from finetune.system.utf8_mode import enter_utf8_mode

# command: (module and function that does it, what `--help` says)
LIGHTNING = {
    "fit": "Train a classifier on a folder of labelled pictures, then test the best checkpoint",
    "validate": "Measure a checkpoint on the validation split",
    "test": "Measure a checkpoint on the test split",
    "predict": "Classify pictures: CKPT and PICTURES, folders, globs or LIST.txt",
}
OWN = {
    "demo": (
        "finetune.demo.demo:demo",
        "Run the whole main job offline on drawn pictures, in a few minutes",
    ),
    "by-hand": (
        "finetune.commands.by_hand:by_hand",
        "Train LeNet on Fashion-MNIST by data parallelism without a framework",
    ),
    "parity": (
        "finetune.commands.parity:parity",
        "Hold every way of using several devices against one device",
    ),
    "benchmark": (
        "finetune.commands.benchmark:benchmark",
        "Measure a fit: pictures per second, and where its time goes",
    ),
    "check": (
        "finetune.commands.check:check",
        "Say what is wrong with a folder of pictures before hours are spent",
    ),
    "cache": (
        "finetune.commands.cache:cache",
        "List or remove decoded pictures and features that are kept",
    ),
    "export": (
        "finetune.commands.export:export",
        "Write a checkpoint as an ONNX or other file, held against it",
    ),
    "report": (
        "finetune.commands.report:report",
        "Write the page of a run: result, classes, mistakes, how to repeat it",
    ),
    "compare": (
        "finetune.commands.report:report",
        "Put runs next to each other on one page: finetune compare A B",
    ),
    "runs": (
        "finetune.commands.runs:runs",
        "List the runs of a folder with their accuracy and size, or delete some",
    ),
    "serve": (
        "finetune.commands.serve:serve",
        "Answer requests about pictures, with a page for people",
    ),
    "sheet": (
        "finetune.commands.sheet:sheet",
        "Draw a sheet of predicted pictures with their probabilities",
    ),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    0 done, 1 failed, 2 wrong usage, 130, 143 and 129 stopped by Ctrl-C, SIGTERM and a closed terminal (a service that
    has answered what it accepted: 0).
    """
    if args is None:
        enter_utf8_mode()
    began = time.monotonic()
    arguments = list(sys.argv[1:] if args is None else args)
    is_own = args is None  # the process is ours, and ends with this
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
        end_with(stop.code)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        has_failed = code != 0
        raise
    except BaseException as raised:
        error = find_interruption(raised)
        code = exit_code(error)
        has_failed = True
        # the reader of our output, such as `head`, went away
        if isinstance(error, BrokenPipeError) and redirect_closed_outputs():
            end_with(code := 141)
            sys.exit(code)
        message = one_line(error)
        if message is not None and not os.environ.get("FINETUNE_DEBUG"):
            _print_error(message, code)
        elif is_own and _has_nccl_group():
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            raise
    finally:
        if has_failed and is_own and _has_nccl_group():
            _exit_without_peers(code)
        _destroy_process_group()
    end_with(code)
    sys.exit(code)


def _exit_at_signals() -> dict[int, Any]:
    """Exit in order at SIGTERM and SIGHUP, and return the handlers of before."""
    # The first process of a container ignores what it has no handler for, and `nohup` has SIGHUP ignored.
    signums = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    return {
        signum: signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
        for signum in signums
    }


def _run_then_restore(
    arguments: Sequence[str], began: float, handlers: dict[int, Any], is_own: bool
) -> None:
    """Run a command, then set the signal handlers of before."""
    try:
        run(arguments, began)
        if sys.stdout is not None:  # a daemon's may be closed
            sys.stdout.flush()
    finally:
        # what comes now is short: a second Ctrl-C ends it, and workers that end are no news
        if is_own:
            handlers = handlers | {signal.SIGINT: signal.SIG_DFL, signal.SIGCHLD: signal.SIG_DFL}
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _set_up_process() -> None:
    drop_stale_ranks()
    mark_own_process()
    outlive_terminal()
    install_unraisable_hook()
    end_with_rank_zero()


def _print_error(message: str, code: int) -> None:
    """Print the one line of an error; of a stop by a signal, only in the first process."""
    if code < 128 or _is_rank_zero():
        redirect_closed_outputs()
        print(message if code > 128 else f"finetune: error: {shown(message)}", file=sys.stderr)


def run(arguments: Sequence[str], began: float | None = None) -> None:
    """Run the command that `arguments` begin with, since `began` on the clock of `time.monotonic`."""
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
        if command != "fit" and "torch" not in sys.modules:
            # Threads that wait leave the cores to what reads pictures: an eighth faster. Training gains nothing.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        in_full = in_full_spelling(arguments)
        with _exit_at_signals_without_raising():
            import_torchmetrics()
            from finetune.commands.lightning_cli import run_lightning

        # a data module's come with its class: these are those of a folder's
        if arguments[1:] == ["--help", "all"]:
            with contextlib.suppress(SystemExit):
                run_lightning(in_full)
            in_full = [command, "--data.help", "finetune.ImageFolderData"]
        run_lightning(in_full, typed=arguments, began=began)
    elif command in OWN:
        run_own(command, arguments[1:])
    else:
        hint = did_you_mean(command, [*LIGHTNING, *OWN])
        print(f"finetune: error: there is no command {command!r}{hint}", file=sys.stderr)
        sys.exit(2)


def run_own(command: str, arguments: Sequence[str]) -> None:
    """Call one of our own commands; its signature and docstring are its flags and help."""
    from jsonargparse import auto_cli

    from finetune.commands.parser import OneLineErrorParser

    if command in WORDS:
        arguments = with_pictures(in_full_spelling([command, *arguments]))[1:]
    if command == "serve" and "torch" not in sys.modules:
        # as for predict: the cores are for decoding, too
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    module, _, name = OWN[command][0].partition(":")
    with _exit_at_signals_without_raising():
        function = getattr(importlib.import_module(module), name)
    # the flags of fit, and some more; several folders without a flag
    if command == "compare":
        function(arguments, command)
        return
    if command in ("benchmark", "report", "runs"):
        function(arguments)
        return
    has_folder = command == "check"
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
    """End at a signal without raising it: libraries would swallow that while they are imported, or break half-way."""
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
        freeze_imported()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _help() -> str:
    table = {**LIGHTNING, **{name: text for name, (_, text) in OWN.items()}}
    rows = "\n".join(f"  {name:<10} {text}" for name, text in table.items())
    return f"""usage: finetune COMMAND [options]

Turns a folder of labelled pictures into an image classifier, the same on any number of devices.

commands:
{rows}

  finetune COMMAND --help    the options of a command
  finetune --version         the version

for example:
  finetune fit FOLDER --epochs 10
  finetune fit --config hotdog.yaml
  finetune predict runs/fit/version_0 PICTURES"""


def _is_rank_zero() -> bool:
    # who was stopped by it has it already
    from finetune.distributed.signals import is_rank_zero

    return is_rank_zero()


def _has_nccl_group() -> bool:
    """Return whether this process speaks through NCCL: who leaves that waits for those that wait for him."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_backend() == "nccl"


def _exit_without_peers(code: int) -> None:
    """End without a word to the other processes: nothing is left that is to be done at Python's end."""
    if loader := sys.modules.get("finetune.data.loader"):
        loader.end_workers()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _destroy_process_group() -> None:
    # What an error has interrupted: other processes wait for this one until it has left them.
    if loader := sys.modules.get("finetune.data.loader"):
        loader.end_workers()
    # Without this a gloo rank sometimes aborts at exit ("terminate called without an active exception").
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        # of the trainer, which refers to itself and to groups of its own: their threads end with them
        gc.collect()
