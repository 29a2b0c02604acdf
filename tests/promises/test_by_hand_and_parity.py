"""`finetune by-hand` and `finetune parity`: training on several devices is training on one."""

import re
from pathlib import Path

import pytest
import torch
from data_files import write_unpacked
from paths import ROOT
from processes import Process, run_script

from finetune.parity import data_parallel
from finetune.parity.ways import Job, compare

LINE = re.compile(r"epoch (\d+)  test accuracy (0\.\d{4}|1\.0000)  time (\d+\.\d) s")
ROW = re.compile(r" *(\S+(?: \S+)*)  +(\w+) +(\d) +(\S+) +(\S+) +(\S+) *")
WAYS = [
    *("one device", "by hand", "ddp", "ddp batch norm"),
    *("pipeline gpipe", "pipeline 1f1b", "layer-wise", "branches"),
]
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
        out = ("--out", f"new/{len(found)}.html")
        cli("by-hand", "--devices", devices, "--seed", seed, *out, *QUICK)
        *lines, last = capsys.readouterr().out.splitlines()
        matches = [LINE.fullmatch(line) for line in lines]
        assert [match and match[1] for match in matches] == ["1", "2", "3"]
        assert last == f"accuracy curve in {out[1]}"
        assert "test accuracy by epoch" in Path(out[1]).read_text("utf-8")
        found.append([float(match[2]) for match in matches if match])
    assert found[0] == found[1] != found[2] and found[0][-1] > 0.5


def parity(folder: Path, mistake: str, *arguments: object) -> tuple[Process, list[list[str]]]:
    """Run `finetune parity`, and return its process and the rows of its table."""
    done = run_script(ROOT / "tests/support/parity_ways.py", mistake, *arguments, cwd=folder)
    found = [ROW.fullmatch(line) for line in done.stdout.splitlines()]
    return done, [list(match.groups()) for match in found if match]


@pytest.mark.timeout(300)
def test_every_way_of_parity_computes_what_one_device_does(tmp_path):
    done, rows = parity(tmp_path, "none", "--devices", 3, "--steps", 4, "--dtype", "float64")
    assert done.returncode == 0, done.stderr
    assert [name for name, *_ in rows] == WAYS
    for name, _, devices, difference, moved, milliseconds in rows:
        # float64: rounding over 4 steps, far below any mistake; the control below is at 1e-4 and more
        assert name == "one device" or float(difference) <= 1e-10, rows
        assert 1e-3 < float(moved) < 1 and float(milliseconds) > 0, rows
        assert int(devices) == {"one device": 1, "branches": 2}.get(name, 3)


def test_parity_prints_a_row_for_each_way_and_catches_gradients_that_are_not_added_up(tmp_path):
    done, rows = parity(tmp_path, "no_sum", "--steps", 2)
    assert done.returncode == 1 and done.stderr.endswith(" by hand, branches\n"), done.stderr
    assert [name for name, *_ in rows] == WAYS  # the table comes first
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_parity_on_cuda_devices(tmp_path):
    rows = compare(Job(tmp_path, 2, 4, torch.float64, is_cuda=True))
    assert all(row.difference <= 1e-10 for row in rows)
