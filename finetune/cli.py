"""The command line: Lightning's fit, validate, test and predict beside our own commands, in one table.

This module imports nothing heavy, so that `finetune --help` answers at once.
"""

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence

from finetune import __version__
from finetune.commands.command_line import in_full_spelling, with_pictures
from finetune.commands.help_pages import help_page
from finetune.commands.short_words import WORDS
from finetune.distributed.ranks import end_with_first_process
from finetune.system.lean_imports import import_less
from finetune.system.messages import did_you_mean
from finetune.system.terminal import let_go, outlive_terminal
from finetune.system.unraised import take_unraisable

# command: (module and function that does it, what `--help` says)
LIGHTNING = {
    "fit": "Train a classifier on a folder of labelled pictures, then test the best checkpoint",
    "validate": "Measure a checkpoint on the validation split",
    "test": "Measure a checkpoint on the test split",
    "predict": "Classify pictures: CKPT and PICTURES, folders, globs or LIST.txt",
}
OWN = {
    "demo": ("finetune.commands.demo:demo", "Run the whole main job offline on drawn pictures, in a few minutes"),
    "by-hand": (
        "finetune.commands.by_hand:by_hand",
        "Train LeNet on Fashion-MNIST by data parallelism without a framework",
    ),
    "parity": ("finetune.commands.parity:parity", "Hold every way of using several devices against one device"),
    "benchmark": (
        "finetune.commands.benchmark:benchmark",
        "Measure a fit: pictures per second, and where its time goes",
    ),
    "check": ("finetune.commands.check:check", "Say what is wrong with a folder of pictures before hours are spent"),
    "cache": ("finetune.commands.cache:cache", "List or remove decoded pictures and features that are kept"),
    "export": (
        "finetune.commands.export:export",
        "Write a checkpoint as an ONNX or other file, held against it",
    ),
    "report": (
        "finetune.commands.report:report",
        "Write the page of a run: result, classes, mistakes, how to repeat it",
    ),
    "serve": ("finetune.commands.serve:serve", "Answer requests about pictures, with a page for people"),
    "sheet": ("finetune.commands.sheet:sheet", "Draw a sheet of predicted pictures with their probabilities"),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    0 done, 1 failed, 2 wrong usage, 130, 143 and 129 stopped by Ctrl-C, SIGTERM and a closed terminal.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    is_own = args is None  # the process is ours, and ends with this
    code = 0
    # The first process of a container ignores what it has no handler for, and `nohup` has SIGHUP ignored.
    signums = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda signum, _: sys.exit(128 + signum)) for signum in signums}
    if is_own:
        outlive_terminal()
        take_unraisable()
        end_with_first_process()
    try:
        try:
            run(arguments)
            if sys.stdout is not None:  # a daemon's may be closed
                sys.stdout.flush()
        finally:
            if is_own:  # what comes now is short: a second Ctrl-C ends it, and workers that end are no news
                before |= {signal.SIGINT: signal.SIG_DFL, signal.SIGCHLD: signal.SIG_DFL}
            for signum, handler in before.items():
                signal.signal(signum, handler)
    except KeyboardInterrupt:
        code = 130
    except SystemExit:
        raise
    except BaseException as error:
        code = _exit_code(error)
        message = _one_line(error)
        if isinstance(error, BrokenPipeError) and let_go():  # the reader of our output, such as `head`, went away
            sys.exit(141)
        if message is None or os.environ.get("FINETUNE_DEBUG"):
            raise
        if code < 128 or _is_first_process():
            let_go()
            print(message if code > 128 else f"finetune: error: {message}", file=sys.stderr)
        elif not {"RANK", "SLURM_PROCID"} & os.environ.keys():
            code = 0  # started by Lightning, which would kill the first process for it
    finally:
        _leave_process_group()
    sys.exit(code)


def run(arguments: Sequence[str]) -> None:
    """Run the command that `arguments` begin with."""
    import_less(has_plots=False)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_help())
    elif command in ("-V", "--version", "version"):
        print(f"finetune {__version__}")
    elif page := help_page(arguments):
        print(page)
    elif command in LIGHTNING:
        if strange := [argument for argument in arguments if argument.encode(errors="ignore").decode() != argument]:
            raise ValueError(f"{os.fsencode(strange[0])!r} is not UTF-8, as configs and checkpoints are: rename it")
        if command != "fit" and "torch" not in sys.modules:
            # Threads that wait leave the cores to what reads pictures: a sixth faster. Training gains nothing from it.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        in_full = in_full_spelling(arguments)
        with _ending_at_once():
            from finetune.commands.lightning_cli import run_lightning

        if arguments[1:] == ["--help", "all"]:  # a data module's come with its class: these are those of a folder's
            with contextlib.suppress(SystemExit):
                run_lightning(in_full)
            in_full = [command, "--data.help", "finetune.ImageFolderData"]
        run_lightning(in_full, typed=arguments)
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
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for predict: the cores are for decoding, too
    module, _, name = OWN[command][0].partition(":")
    with _ending_at_once():
        function = getattr(importlib.import_module(module), name)
    if command in ("benchmark", "report"):  # the flags of fit, and some more; several folders without a flag
        function(arguments)
        return
    has_folder = command == "check"
    name = f"finetune {command}"
    auto_cli(function, args=list(arguments), prog=name, parser_class=OneLineErrorParser, as_positional=has_folder)


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """End at a signal without raising it: libraries would swallow that while they are imported, or break half-way."""
    signums = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda signum, _: os._exit(128 + signum)) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _help() -> str:
    table = {**LIGHTNING, **{name: text for name, (_, text) in OWN.items()}}
    rows = "\n".join(f"  {name:<10} {text}" for name, text in table.items())
    return f"""usage: finetune COMMAND [options]

Turns a folder of labelled pictures into an image classifier, the same on one CPU as on eight GPUs.

commands:
{rows}

  finetune COMMAND --help    the options of a command
  finetune --version         the version

for example:
  finetune fit FOLDER --epochs 10
  finetune fit --config hotdog.yaml
  finetune predict runs/fit/version_0 PICTURES"""


def _raised(error: BaseException) -> BaseException:
    """Return what a constructor raised, which jsonargparse wraps."""
    while str(error).startswith("Does not validate against any of the Union") and error.__cause__ is not None:
        error = error.__cause__
    return error


def _exit_code(error: BaseException) -> int:
    wrong_usage = type(error).__name__ == "MisconfigurationException"  # Lightning's word for it
    return getattr(_raised(error), "exit_code", 2 if wrong_usage else 1)


def _one_line(error: BaseException) -> str | None:
    """Return what to tell a user, or None for an error that is ours and deserves a traceback."""
    signals = sys.modules.get("finetune.distributed.signals")  # imports torch: who has not got it can't have raised it
    if isinstance(error, getattr(signals, "Interrupted", ())):
        return str(error)
    error = _raised(error)
    text = str(error)
    others: BaseException | None = error
    while others is not None:  # raised anywhere, since a signal brings the news: a library may have made another of it
        if re.search("DataLoader worker .*(killed by signal|exited unexpectedly)", str(others)):
            break
        others = others.__cause__ or others.__context__
    if others is not None or isinstance(error, ConnectionResetError):  # while it handed over a batch
        return "a process that reads pictures was killed, perhaps for want of memory: fewer --data.num_workers may help"
    if isinstance(error, MemoryError) or "ArrayMemoryError" in text or "DefaultCPUAllocator" in text:
        return "out of memory: a smaller --batch (--data.batch_size) or fewer --workers (--data.num_workers) may help"
    if "Caught " in text and "DataLoader worker" in text:  # a worker's error carries its traceback as text
        text = text.strip().splitlines()[-1].partition(": ")[2]
    elif type(error).__name__ == "OutOfMemoryError":
        return "out of GPU memory: a smaller --batch (--data.batch_size) or --size may help, or --precision bf16-mixed"
    elif "connectFullMesh" in text:
        rank, address = os.environ.get("RANK", "0"), text.rpartition("remote=")[2]
        reached = "it ended, or GLOO_SOCKET_IFNAME must name the network between them"
        return f"process {rank} can't reach another one at {address}: {reached}"
    elif type(error).__name__ == "DistBackendError" or "gloo" in text:
        return f"process {os.environ.get('RANK') or os.environ.get('LOCAL_RANK', '0')} ended, since another one did"
    elif not isinstance(error, (ValueError, OSError)) and type(error).__name__ != "MisconfigurationException":
        told = text.startswith(("Early stopping conditioned on metric", "`devices` selected with"))  # by Lightning
        return " ".join(text.split()) if told else None
    elif isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{error.strerror}: {os.path.abspath(error.filename)}"
    return " ".join(text.split()) or type(error).__name__


def _is_first_process() -> bool:
    from finetune.distributed.signals import is_first_process  # who was stopped by it has it already

    return is_first_process()


def _leave_process_group() -> None:
    # Without this a gloo rank sometimes aborts at exit ("terminate called without an active exception").
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()  # of the trainer, which refers to itself and to groups of its own: their threads end with them
