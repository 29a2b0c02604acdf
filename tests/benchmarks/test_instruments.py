"""The measuring instruments of benchmarks/ miss nothing."""

import sys

import pytest

from benchmarks.peers import measure

pytestmark = pytest.mark.slow


def test_the_clock_sees_every_optimizer_step_and_no_other_process(tmp_path):
    """Rates of all tools are taken from these times."""
    code = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
for optimizer in (torch.optim.SGD([weight], 0.1), torch.optim.AdamW([weight])):
    weight.sum().backward()
    optimizer.step()
"""
    done = measure.run([sys.executable, "-c", code], {}, tmp_path / "log")
    assert len(done["stamps"]) == 2
    assert 0 < done["stamps"][0] <= done["stamps"][1] < done["seconds"]
    assert measure.run([sys.executable, "-c", "print(1)"], {}, tmp_path / "other")["stamps"] == []


def test_processor_time_is_that_of_all_processes_and_of_no_pause(tmp_path):
    child = "import time; time.sleep(1)\nwhile time.process_time() < 0.5: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = measure.run([sys.executable, "-c", code], {}, tmp_path / "log")
    # it pauses for a second; half of that is the margin
    assert 0.5 <= done["cpu_seconds"] < done["seconds"] - 0.5
