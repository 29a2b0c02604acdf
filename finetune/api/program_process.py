"""The process of a program in which a command runs: it is restored afterwards, or another process runs the command."""

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data._utils import signal_handling  # noqa: PLC2701

from finetune.distributed.child_command import start_command, wait_for
from finetune.distributed.launch import has_launcher, num_local_devices
from finetune.fitting.plan import Plan, plan_file, read_answer
from finetune.runs import run_lock
from finetune.settings.schema import TrainerSettings
from finetune.system.machine import give_freed_memory_back
from finetune.system.messages import WrongUsage

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
# Loggers whose level a command sets. Their library may not have created them yet.
_LOGGERS = ("finetune", "pytorch_lightning", "lightning.pytorch", "lightning_fabric")


@contextmanager
def preserved_process() -> Iterator[None]:
    """Restore the state of this process at the end.

    The state is that of random number generators, environment variables, warnings, logging, signal handlers, the
    process group, locks of runs, and the C library's memory allocator. Settings of torch are the program's: they
    stay in effect, and so do those that options of a fit change, such as `trainer.deterministic`.

    Raises:
        WrongUsage: The program has changed the arithmetic of torch: the run would not be that of the command.
    """
    _check_arithmetic()
    had_group = dist.is_available() and dist.is_initialized()
    restorers = [_save_random_state(), _save_environment(), _save_logging(), _save_signals()]
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        finally:
            if dist.is_available() and dist.is_initialized() and not had_group:
                dist.destroy_process_group()
            run_lock.release()
            for restore in reversed(restorers):
                restore()
            gc.collect()  # the trainer is in a reference cycle
            give_freed_memory_back()


def check_not_forked(pid: int) -> None:
    """Make sure that this process is not a fork of one in which torch has started threads.

    A forked process does not have these threads, and torch would wait for them forever.

    Args:
        pid: The process in which torch has computed.

    Raises:
        RuntimeError: This is another process, and torch uses several threads.
    """
    if os.getpid() != pid and torch.get_num_threads() > 1:
        raise RuntimeError(
            "this process was forked, and torch would wait for ever for threads that are not in it: call "
            "torch.set_num_threads(1) before, or start processes by spawn"
        )


def _check_arithmetic() -> None:
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise WrongUsage("a fit cannot run within torch.autocast: call it outside")
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    if dtype != torch.float32 or device.type != "cpu":
        raise WrongUsage(
            f"a fit needs torch's usual defaults, torch.float32 and cpu, not {dtype} and {device}"
        )


def _save_random_state() -> Callable[[], None]:
    python = random.getstate()
    legacy = np.random.get_state()
    cpu = torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)
        # CUDA was not initialised: its generators are seeded when they are created.
        if gpus is None:
            torch.cuda.manual_seed_all(torch.initial_seed())
        else:
            torch.cuda.set_rng_state_all(gpus)

    return restore


def _save_environment() -> Callable[[], None]:
    before = dict(os.environ)
    arguments = sys.argv
    hook = sys.excepthook

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        # torch's process groups install an excepthook
        sys.argv = arguments
        sys.excepthook = hook

    return restore


def _save_logging() -> Callable[[], None]:
    loggers = [logging.getLogger(name) for name in ("", *_LOGGERS)]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]

    def restore() -> None:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers

    return restore


def _save_signals() -> Callable[[], None]:
    if threading.current_thread() is not threading.main_thread():
        return lambda: None  # Python sets signal handlers only in the main thread
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}

    def restore() -> None:
        for signum, handler in before.items():
            if handler is not None and signal.getsignal(signum) != handler:
                signal.signal(signum, handler)
                if signum == signal.SIGCHLD:
                    # so that torch installs its own again for its next workers
                    signal_handling._SIGCHLD_handler_set = False  # noqa: SLF001

    return restore


def needs_processes(trainer: TrainerSettings) -> bool:
    """Return whether a fit would run in other processes than this one.

    Lightning starts the other ranks by running the script of rank 0 again. From a notebook, or from a script without
    `if __name__ == "__main__"`, this would run the user's code again.
    """
    if has_launcher():
        return False  # a launcher has started them already
    num = num_local_devices(trainer.devices, trainer.accelerator)
    return num > 1 or trainer.num_nodes > 1 or trainer.strategy != "auto"


def run_plan(plan: Plan) -> Path:
    """Do the fit of a plan in a subprocess, forward its output, and return the folder of its run.

    Ctrl-C, and other signals that would end this process, are forwarded: the fit saves a checkpoint and stops. A second
    Ctrl-C stops it at once. The subprocess ends when this process ends.

    Raises:
        ValueError: The fit failed with an error message of one line.
        RuntimeError: The fit failed in another way.
        KeyboardInterrupt: Ctrl-C was pressed.
        Interrupted: Another signal came.
    """
    with plan_file(plan) as file:
        code = _run(["fit", "--decided", str(file)])
        run = read_answer(file, "run")
        error = read_answer(file, "error")
    if error is not None:
        raise (WrongUsage if code == WrongUsage.exit_code else ValueError)(error)
    if code or run is None:
        raise RuntimeError(f"the fit ended with code {code}: see its output above")
    return Path(run)


def _run(arguments: list[str]) -> int:
    """Run `finetune` with these arguments, forward its output, and return its exit code."""
    process = start_command(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None and process.stderr is not None
    readers = [
        threading.Thread(target=_forward, args=each, daemon=True)
        for each in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        return wait_for(process)
    finally:
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()


def _forward(source: IO[str], target: IO[str] | None) -> None:
    """Forward lines as they come."""
    encoding = getattr(target, "encoding", None) or "utf-8"
    for line in source:  # also if nobody reads the output, or the subprocess would block
        with suppress(OSError, ValueError, AttributeError):
            print(
                line.encode(encoding, "replace").decode(encoding), end="", file=target, flush=True
            )
