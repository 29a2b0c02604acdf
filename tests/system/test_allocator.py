"""Freed memory stays with the process, instead of being requested from the system again."""

import ctypes
import platform
import resource
from pathlib import Path

import pytest
from processes import run_script

from finetune.system import machine
from finetune.system.machine import keep_freed_memory

# Tensors that glibc maps by themselves, one after the other, after some that fill the process for the first time.
_FAULTS = """
import resource, sys, torch
from finetune.system.machine import give_freed_memory_back, keep_freed_memory

if sys.argv[1] != "leave":
    assert keep_freed_memory()
if sys.argv[1] == "give back":
    give_freed_memory_back()
for i in range(30):
    if i == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, folder: Path) -> int:
    (folder / "faults.py").write_text(_FAULTS)
    return int(run_script(folder / "faults.py", how, cwd=folder, timeout=60).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_pages_are_asked_for_once(tmp_path):
    pages = 48_000_000 // resource.getpagesize()
    # now and then something small takes the place of one
    assert faults("keep", tmp_path) < 4 * pages
    assert faults("leave", tmp_path) > 19 * pages  # the control: anew each time
    assert faults("give back", tmp_path) > 19 * pages


def test_what_the_environment_says_wins(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    assert not keep_freed_memory()


def test_a_c_library_without_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
    monkeypatch.setattr(
        machine.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no such library"))
    )
    assert not keep_freed_memory()
