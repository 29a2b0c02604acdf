"""What a command takes of the machine: its cores, its memory, and the folder of caches."""

import os
import platform
import resource
from pathlib import Path

import pytest
from processes import run_script

from finetune.system.cache_dir import cache_dir
from finetune.system.machine import num_cores


def test_num_cores_are_those_that_taskset_leaves():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)


def test_finetune_cache_comes_before_xdg_cache_home_and_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FINETUNE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache/finetune"
    monkeypatch.setenv("XDG_CACHE_HOME", "/all")
    assert cache_dir() == Path("/all/finetune")
    monkeypatch.setenv("FINETUNE_CACHE", "/own")
    assert cache_dir() == Path("/own")


# Tensors that glibc maps by themselves, one after the other, after some that fill the process for the first time.
FAULTS = """
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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_not_requested_again_at_each_step(tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    faults = {
        how: int(run_script(tmp_path / "faults.py", how, cwd=tmp_path, timeout=60).stdout)
        for how in ("keep", "leave", "give back")
    }
    pages = 48_000_000 // resource.getpagesize()
    assert faults["keep"] < 4 * pages  # now and then something small takes the place of one
    assert faults["leave"] > 19 * pages  # the control: anew each time
    assert faults["give back"] > 19 * pages
