"""`finetune by-hand` and `finetune parity`: training on several devices is training on one."""

import re
from functools import partial

import pytest
import torch
from data_files import write_unpacked
from parity_ways import WAYS
from PIL import Image
from processes import forked_subprocess
from torch import multiprocessing

from finetune.commands.parity import compare
from finetune.parity import data_parallel, many_processes

LINE = re.compile(r"epoch (\d+)  test accuracy (0\.\d{4}|1\.0000)  time (\d+\.\d) s")
# 200 images in batches of 24, and a last one of 8
QUICK = ("--batch_size", 24, "--epochs", 3, "--lr", 0.5, "--root", "clothes", "--dtype", "float64")

pytestmark = pytest.mark.slow


def test_by_hand_has_the_same_accuracies_on_any_number_of_replicas(
    cli, tmp_path, capsys, monkeypatch
):
    # ten times the weights of the book, with which it would not train in so few steps
    init = data_parallel.init_params
    louder = lambda *arguments: [10 * p for p in init(*arguments)]  # noqa: E731
    monkeypatch.setattr(data_parallel, "init_params", louder)
    write_unpacked(tmp_path / "clothes")
    found = []
    for devices, seed in (("cpu", 0), ("cpu, cpu, cpu, cpu", 0), ("cpu,cpu", 1)):
        out = ("--out", f"new/{len(found)}.png")
        cli("by-hand", "--devices", devices, "--seed", seed, *out, *QUICK)
        *lines, last = capsys.readouterr().out.splitlines()
        matches = [LINE.fullmatch(line) for line in lines]
        assert [match and match[1] for match in matches] == ["1", "2", "3"]
        assert last == f"accuracy curve in {out[1]}"
        with Image.open(out[1]) as curve:
            assert curve.size == (840, 480)
        found.append([float(match[2]) for match in matches if match])
    assert found[0] == found[1] != found[2] and found[0][-1] > 0.5


@pytest.mark.timeout(300)
def test_every_way_of_parity_computes_what_one_device_does(tmp_path, monkeypatch):
    monkeypatch.setattr(many_processes, "subprocess", forked_subprocess())
    forked = partial(multiprocessing.start_processes, start_method="fork")
    # new interpreters import torch for seconds
    monkeypatch.setattr(multiprocessing, "spawn", forked)
    rows = compare(tmp_path, 3, 4, "float64")
    assert [row.name for row in rows] == WAYS
    for row in rows:
        # float64: rounding over 4 steps, far below any mistake; the control below is at 1e-4 and more
        assert row.difference is not None and row.difference <= 1e-10, row
        assert row.moved > 1e-3 and row.seconds > 0, row
        assert row.devices == {"one device": 1, "branches": 2}.get(row.name, 3)


def test_parity_prints_a_row_for_each_way_and_catches_gradients_that_are_not_added_up(
    cli, monkeypatch, capsys
):
    monkeypatch.setattr(many_processes, "subprocess", forked_subprocess())
    forked = partial(multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(multiprocessing, "spawn", forked)
    monkeypatch.setattr(data_parallel, "allreduce", lambda data: None)
    with pytest.raises(ValueError, match="by hand$"):
        cli("parity", "--steps", "2")
    out = capsys.readouterr().out  # the table comes first
    names = {line.split()[0] for line in out.splitlines()[2 : 2 + len(WAYS)]}
    assert names == {way.split()[0] for way in WAYS} and max(map(len, out.splitlines())) <= 100


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_parity_on_cuda_devices(tmp_path):
    rows = compare(tmp_path, 2, 4, "float64")
    assert all(row.difference is None or row.difference <= 1e-10 for row in rows)
