"""The subprocesses of `finetune parity`."""

import pytest
import torch
from processes import forked_subprocess

from finetune.parity import many_processes, one_process
from finetune.parity.one_process import Job, distance

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path, k=1, steps=2, dtype="float64", is_cuda=False, batch_size=8)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork what would be an interpreter; tests/api/test_child_process.py starts one."""
    monkeypatch.setattr(many_processes, "subprocess", forked_subprocess())


def test_a_failing_fit_is_reported_in_its_own_words(job):
    with pytest.raises(
        ValueError,
        match=r"finetune fit of lenet failed: finetune: error: there is no weights file .*lenet.pt",
    ):
        many_processes.by_lightning("lenet", job)  # nobody wrote its files


def test_a_fit_leaves_the_weights_of_its_process(job, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # a shell may have one, and both must mean it
    batches, start = one_process.draw_batches(job), one_process.initial_network("lenet", job)
    found = many_processes.by_lightning("lenet", job)
    one = one_process.on_one_device(start, batches, torch.device("cpu"))
    assert len(found.states) == 1 and found.seconds > 0
    assert distance(found.states[0], one.states[0]) <= 1e-10  # float64, two steps
