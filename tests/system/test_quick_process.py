"""A process exits at once, after all its exit work, and without a last garbage collection."""

import atexit
import gc
import os
import subprocess
import sys

import pytest

from finetune.system import quick_process
from finetune.system.quick_process import freeze_imported, without_gc

SCRIPT = """
import atexit, sys, threading, time
from finetune.system.quick_process import end_with, freeze_imported, mark_own_process, without_gc
class Slow:
    def __del__(self):
        print("taken apart", flush=True)
slow = Slow()
atexit.register(print, "before")
mark_own_process()
with without_gc():
    import json
freeze_imported()
atexit.register(print, "registered")
def later():
    time.sleep(0.1)
    print("thread")
threading.Thread(target=later).start()
sys.stdout.write("begun ")
{end}
"""


def ended(end):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (None, 0)])
def test_it_ends_with_its_code_after_threads_and_what_is_registered(code, expected):
    done = ended(f"end_with({code}); sys.exit({code})")
    assert (done.returncode, done.stdout, done.stderr) == (
        expected,
        "begun thread\nregistered\nbefore\n",
        "",
    )


@pytest.mark.parametrize(
    "end", ["sys.exit('some words')", "end_with('some words'); sys.exit('some words')"]
)
def test_without_a_number_python_ends_by_itself(end):
    done = ended(end)
    assert (done.returncode, done.stdout) == (1, "begun thread\nregistered\nbefore\ntaken apart\n")
    assert done.stderr == "some words\n"


def test_what_fails_at_the_end_keeps_nothing_else_from_being_done():
    done = ended("atexit.register(int, 'no number'); end_with(3); sys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "begun thread\nregistered\nbefore\n")
    assert "no number" in done.stderr


def test_an_error_is_reported_as_ever():
    done = ended("raise ValueError('of ours')")
    assert (
        done.returncode == 1
        and done.stderr.endswith("ValueError: of ours\n")
        and "taken apart" in done.stdout
    )


@pytest.mark.parametrize(
    ("end", "code", "is_reported"), [("end_with(141)", 141, False), ("", 120, True)]
)
def test_nobody_reads_what_is_left(end, code, is_reported):
    script = f"import sys; from finetune.system.quick_process import *; mark_own_process(); print('unread'); {end}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=buffered, **pipes) as process:
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == code and (b"BrokenPipeError" in errors) == is_reported


def test_imports_are_not_searched():
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_was_imported_is_left_alone_in_a_process_of_ours(is_ours, monkeypatch):
    monkeypatch.setattr(quick_process, "_is_ours", is_ours)
    imported: list[list[int]] = [[] for _ in range(2000)]  # objects that no earlier test has frozen
    before = gc.get_freeze_count()
    try:
        freeze_imported()
        assert (gc.get_freeze_count() >= before + len(imported)) == is_ours
    finally:
        gc.unfreeze()
        atexit.unregister(gc.unfreeze)


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_comes_back_after_an_error():
    with pytest.raises(ImportError), without_gc():
        raise ImportError
    assert gc.isenabled()


# What torchmetrics needs and scipy.signal does not is imported once; each way continues in a fork of that.
_SIGNAL = """
import os, sys
import matplotlib.pyplot, numpy, scipy.stats, torch, torchvision
from finetune.system.quick_process import import_torchmetrics
for how in ("quick", "before", "control"):
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    if how == "before":
        import scipy.signal
    if how != "control":
        import_torchmetrics()
    import torchmetrics.classification
    is_there = "scipy.signal" in sys.modules
    import scipy.signal
    print(how, is_there, scipy.signal.hilbert([1.0, 2.0]).shape, torchmetrics.Accuracy.__name__)
    break
"""


@pytest.mark.slow
def test_torchmetrics_is_imported_without_scipy_signal():
    # Python 3.12 warns of a fork where libraries have threads
    warnings = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    command = [sys.executable, *warnings, "-c", _SIGNAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expected = [
        "quick False (2,) Accuracy",
        "before True (2,) Accuracy",
        "control True (2,) Accuracy",
    ]
    assert done.stdout.splitlines() == expected, done.stderr
