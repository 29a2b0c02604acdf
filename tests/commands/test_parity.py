"""`finetune parity`: every way is compared with one device, the table is right, and a wrong way is caught."""

from functools import partial
from pathlib import Path

import pytest
import torch
from parity_ways import WAYS
from processes import forked_subprocess
from torch import multiprocessing

from finetune.commands import parity
from finetune.commands.parity import Row, compare
from finetune.parity import data_parallel, many_processes, one_process
from finetune.parity.one_process import Job, Trained


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_processes, "subprocess", forked_subprocess())
        forked = partial(multiprocessing.start_processes, start_method="fork")
        patch.setattr(multiprocessing, "spawn", forked)  # new interpreters import torch for seconds
        return compare(tmp_path_factory.mktemp("parity"), 3, 4, "float64")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_way_computes_what_one_device_does(rows):
    assert [row.name for row in rows] == WAYS
    for row in rows:
        # float64: rounding over 4 steps, far below any mistake; the control below is at 1e-4 and more
        assert row.difference is not None and row.difference <= 1e-10, row
        assert row.moved > 1e-3, row
        assert row.seconds > 0 and row.devices == {"one device": 1, "branches": 2}.get(row.name, 3)


@pytest.fixture
def by_hand_alone(monkeypatch):
    """Leaves out what takes processes of its own."""
    monkeypatch.setattr(
        many_processes,
        "splits",
        lambda *_: {"pipeline gpipe": "a network of 4 parts cannot be split into 5"},
    )

    def start(network: str, job: Job) -> Trained:
        batches = one_process.draw_batches(job)
        return one_process.on_one_device(
            one_process.initial_network(network, job), batches, torch.device("cpu")
        )

    monkeypatch.setattr(many_processes, "by_lightning", start)


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_way(cli, by_hand_alone, capsys):
    threads = torch.get_num_threads()
    cli("parity", "--steps", "2", "--dtype", "float32")
    out = capsys.readouterr().out
    names = "one by ddp ddp pipeline branches"
    assert [line.split()[0] for line in out.splitlines()[2:8]] == names.split()
    assert "pipeline gpipe was skipped: a network of 4 parts cannot be split into 5" in out
    assert "2 steps in float32" in out and max(map(len, out.splitlines())) <= 100
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_control_gradients_that_are_not_added_up_are_caught(
    cli, by_hand_alone, monkeypatch, capsys
):
    monkeypatch.setattr(data_parallel, "allreduce", lambda data: None)
    with pytest.raises(ValueError, match="by hand$"):
        cli("parity", "--steps", "2")
    assert "by hand" in capsys.readouterr().out  # the table comes first


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_cuda_devices(tmp_path: Path):
    assert all(
        row.difference is None or row.difference <= 1e-10
        for row in parity.compare(tmp_path, 2, 4, "float64")
    )
