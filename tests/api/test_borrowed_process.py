"""A fit from Python restores the process: each change of the command is seen during the fit and undone after it."""

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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fit_words import QUICK
from pytorch_lightning import seed_everything
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from finetune import fit
from finetune.api import borrowed_process
from finetune.api.borrowed_process import preserved_process
from finetune.distributed.signals import install_stop_at_once
from finetune.runs import run_lock
from finetune.system.messages import be_quiet

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


@pytest.fixture(autouse=True)
def as_in_a_fresh_process() -> Iterator[None]:
    """Let loggers be as before any command: others have run in this process."""
    loggers = [logging.getLogger(name) for name in ("finetune", "pytorch_lightning", "matplotlib")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def state() -> dict[str, Any]:
    """Return what a program may notice, each thing in a form that can be compared."""
    loggers = [
        logging.getLogger(),
        *map(logging.getLogger, ("finetune", "pytorch_lightning", "matplotlib")),
    ]
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
        "locks": dict(run_lock._held),
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


def make_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("python numpy torch environment", lambda _: seed_everything(7)),
    ("environment", lambda _: os.environ.update(PL_GLOBAL_SEED="7", PATH="elsewhere")),
    ("environment", lambda _: os.environ.pop("PATH")),
    ("arguments", lambda _: setattr(sys, "argv", ["other"])),
    ("warnings logging", lambda _: be_quiet()),
    ("logging", lambda _: logging.getLogger("matplotlib").setLevel(logging.ERROR)),
    ("signals", lambda _: install_stop_at_once()),
    ("group", lambda _: make_group()),
    ("locks", run_lock.hold),
]


@pytest.mark.parametrize(
    ("names", "change"), CHANGES, ids=[f"{i}-{names}" for i, (names, _) in enumerate(CHANGES)]
)
def test_what_is_changed_is_put_back(names, change, tmp_path):
    before = state()
    with preserved_process():
        within = state()
        change(tmp_path)
        assert set(names.split()) <= differing(within, state())  # control: it is seen
    assert differing(before, state()) == set()


def test_an_error_and_a_stop_leave_no_more(tmp_path):
    before = state()
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), preserved_process():
            seed_everything(7)
            be_quiet()
            install_stop_at_once()
            raise error
    assert differing(before, state()) == set()


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (torch.autocast("cpu"), "autocast"),
        (torch.inference_mode(), "inference_mode"),
        (torch.no_grad(), "no_grad"),
    ],
)
def test_a_context_that_can_not_be_left_is_reported(context, name):
    with (
        context,
        pytest.raises(ValueError, match=f"torch.{name}"),
        preserved_process(),
    ):
        raise AssertionError("it began")


def test_another_default_dtype_is_reported():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match="default dtype"), preserved_process():
            raise AssertionError("it began")
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_group_that_was_there_stays(group_of_one):
    with preserved_process():
        pass
    assert dist.is_initialized()


def test_torch_s_workers_have_their_handler_again_after_it(monkeypatch):
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    with preserved_process():
        list(DataLoader([1, 2], num_workers=1))
        assert signal.getsignal(signal.SIGCHLD) != before
    assert signal.getsignal(signal.SIGCHLD) == before and not signal_handling._SIGCHLD_handler_set


@pytest.fixture(scope="module")
def warm(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A fit has run: what is imported late has been, and stays."""
    options = {**QUICK["options"], "report": True}
    fit(colours, **{**QUICK, "workers": 1, "options": options}, out=tmp_path_factory.mktemp("warm"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fit_leaves_nothing_behind(colours, quick, workers, warm):
    options = {**quick["options"], "report": True}
    before, files = state(), open_files()
    fit(colours, **{**quick, "workers": workers, "options": options}, seed=5)
    assert differing(before, state()) == set()
    assert open_files() == files


@pytest.mark.slow
def test_control_without_it_a_fit_is_noticed(colours, quick, monkeypatch, warm):
    random.seed(99)  # an earlier fit's seed may have been the same
    np.random.seed(99)
    torch.manual_seed(99)
    before = state()
    with preserved_process(), monkeypatch.context() as patch:
        patch.setattr("finetune.api.fitting.preserved_process", nullcontext)
        fit(colours, **quick)
        left = differing(before, state())
    assert {
        "python",
        "numpy",
        "torch",
        "environment",
        "arguments",
        "warnings",
        "logging",
        "locks",
    } <= left
    assert differing(before, state()) == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_s_random_numbers_are_put_back_too():
    torch.cuda.manual_seed_all(3)
    torch.rand(2, device="cuda")
    before = torch.cuda.get_rng_state_all()
    with preserved_process():
        seed_everything(7)
        torch.rand(5, device="cuda")
        assert not torch.equal(before[0], torch.cuda.get_rng_state_all()[0])  # control
    assert torch.equal(before[0], torch.cuda.get_rng_state_all()[0])


_LATE = """
import sys, torch
from pytorch_lightning import seed_everything
from finetune.api.borrowed_process import preserved_process
torch.manual_seed(3)
with preserved_process() if sys.argv[1] == "borrowed" else torch.no_grad():
    if sys.argv[1] != "alone":
        seed_everything(7)
        torch.rand(5, device="cuda")
print(torch.rand(1, device="cuda").item())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_a_fit_uses_first_begins_with_the_program_s_seed():
    reported = {}
    for how in ("alone", "borrowed", "left"):
        done = subprocess.run(
            [sys.executable, "-c", _LATE, how], capture_output=True, text=True, check=True
        )
        reported[how] = done.stdout
    assert reported["borrowed"] == reported["alone"] != reported["left"]


def test_memory_is_handed_out_as_before(monkeypatch):
    given = []
    monkeypatch.setattr(borrowed_process, "give_freed_memory_back", lambda: given.append(True))
    with preserved_process():
        assert not given
    assert given == [True]
