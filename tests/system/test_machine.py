"""The description of this machine."""

import os
import platform
from pathlib import Path

from finetune.system import machine
from finetune.system.machine import num_cores, processor


def test_cores_are_those_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # not every system has it
    assert num_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_cores() == 1


def test_the_processors_name_is_the_kernels_or_pythons(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(
        machine, "Path", lambda name: info if name == "/proc/cpuinfo" else Path(name)
    )
    monkeypatch.setattr(platform, "processor", lambda: "arm64")
    assert processor() == "arm64"  # there is no such file
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Another\n")
    assert processor() == "Some CPU @ 2 GHz"
    info.write_text("processor\t: 0\n")  # as on ARM
    assert processor() == "arm64"
