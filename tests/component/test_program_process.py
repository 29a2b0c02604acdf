"""A fit from Python restores the process: what the command changes is seen during the fit and undone after it."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fit_words import QUICK
from pytorch_lightning import seed_everything

from finetune import fit
from finetune.api.program_process import preserved_process
from finetune.distributed.signals import install_stop_at_once
from finetune.runs import run_lock
from finetune.system.messages import be_quiet

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
LOGGERS = ("finetune", "pytorch_lightning")
OPTIONS = {**QUICK["options"], "report": True}


@pytest.fixture(autouse=True)
def as_in_a_fresh_process() -> Iterator[None]:
    """Let loggers be as before any command: others have run in this process."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def state() -> dict[str, Any]:
    """Return what a program may notice, each thing in a form that can be compared."""
    loggers = [logging.getLogger(), *map(logging.getLogger, LOGGERS)]
    return {
        "python": random.getstate(),
        "numpy": [np.array(part).tolist() for part in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "arguments": list(sys.argv),
        "folder": os.getcwd(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers],
        "signals": [signal.getsignal(signum) for signum in SIGNALS],
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "streams": (sys.stdout, sys.stderr),
        "dtype": torch.get_default_dtype(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "matrices": torch.get_float32_matmul_precision(),
        "anomalies": torch.is_anomaly_enabled(),
        "torch_threads": torch.get_num_threads(),
        "group": dist.is_initialized(),
        "processes": multiprocessing.active_children(),
        "threads": {thread.name for thread in threading.enumerate()},
        "garbage": (gc.isenabled(), gc.get_threshold()),
    }


def open_files() -> list[str]:
    """Return what each descriptor is of, without the numbers of pipes and sockets."""
    names = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(name).partition("[")[0] for name in names if os.path.lexists(name))


def differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names of what has changed; only new threads count, since those of earlier tests may end."""
    after = {**after, "threads": before["threads"] | after["threads"]}
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_what_a_command_changes_is_put_back_also_after_an_error(tmp_path, error):
    before = state()
    with pytest.raises(error) if error else nullcontext(), preserved_process():
        seed_everything(7)
        os.environ["PATH"] = "elsewhere"
        sys.argv = ["other"]
        be_quiet()
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        install_stop_at_once()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        run_lock.hold(tmp_path)
        random_numbers = {"python", "numpy", "torch"}
        seen = {"environment", "arguments", "warnings", "logging", "signals", "group"}
        assert random_numbers | seen <= differing(before, state())  # the control: it is seen
        if error:
            raise error
    assert differing(before, state()) == set()
    run_lock.hold(tmp_path)  # nobody else has it
    run_lock.release()


def test_a_process_group_of_the_program_stays(group_of_one):
    with preserved_process():
        pass
    assert dist.is_initialized()


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("context", "word"),
    [
        (torch.autocast("cpu"), "autocast"),
        (float64_by_default(), "float64"),
        (torch.device("meta"), "meta"),
    ],
)
def test_a_fit_whose_arithmetic_the_program_would_change_is_refused(colours, context, word):
    with context, pytest.raises(ValueError, match=word):
        fit(colours, **QUICK)


@pytest.fixture(scope="module")
def warm(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A fit has run: what is imported late has been, and stays."""
    folder = tmp_path_factory.mktemp("warm")
    fit(colours, **{**QUICK, "workers": 1, "options": OPTIONS}, out=folder)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_fit_leaves_nothing_behind(colours, tmp_path, workers, warm):
    before, files = state(), open_files()
    fit(colours, **{**QUICK, "workers": workers, "options": OPTIONS}, seed=5, out=tmp_path)
    assert differing(before, state()) == set()
    assert open_files() == files


PROGRAM = """
import sys, torch
from pytorch_lightning import seed_everything
from finetune.api.program_process import preserved_process
torch.manual_seed(3)
if "early" in sys.argv:
    torch.rand(2, device="cuda")
with preserved_process() if "borrowed" in sys.argv else torch.no_grad():
    if "alone" not in sys.argv:
        seed_everything(7)
        torch.rand(5, device="cuda")
print(torch.rand(1, device="cuda").item())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("first", ["early", "late"])
def test_random_numbers_of_a_gpu_are_those_of_the_program(first):
    """Whether the program or the fit uses the GPU first."""
    printed = {
        how: subprocess.run(
            [sys.executable, "-c", PROGRAM, how, first], capture_output=True, text=True, check=True
        ).stdout
        for how in ("alone", "borrowed", "left")
    }
    assert printed["borrowed"] == printed["alone"] != printed["left"]
