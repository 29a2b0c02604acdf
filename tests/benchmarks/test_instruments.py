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
