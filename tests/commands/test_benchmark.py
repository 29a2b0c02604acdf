"""`finetune benchmark`: its measurements, its text, and that it leaves no files."""

import json
from pathlib import Path

import pytest
import torch
from colours import QUICK
from processes import forked_subprocess

from finetune.profiling import recorder

SMALL = [
    *QUICK,
    "--model.backbone",
    "lenet",
    "--data.image_size",
    "28",
    "--trainer.max_epochs",
    "60",
]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(recorder, "_SECONDS", 0.01)


@pytest.mark.slow
def test_a_fit_is_measured_and_leaves_nothing_but_the_output(cli, colours, capsys):
    paths = sorted((colours / "train").rglob("*.png"))
    rows = [f"{path},{path.parent.name}" for path in paths]
    Path("images.csv").write_text("\n".join(["path,label", *rows]))
    cli("benchmark", "--data.table", "images.csv", *SMALL, "--repeats", "3", "--output", "out.json")
    shown = capsys.readouterr().out
    assert {path.name for path in Path().iterdir()} == {"images.csv", "out.json"}
    found = json.loads(Path("out.json").read_text())
    assert found["precision"] == "32-true" and found["batch_size"] == 16
    assert len(found["seconds"]) == 3 and min(found["seconds"]) > 0
    assert all(0 <= share < 1 for share in found["waited"])
    assert " images/s, n = 3" in shown and "waiting for data: " in shown


@pytest.mark.slow
def test_numbers_of_devices_are_compared_with_each_other(cli, colours, capsys, monkeypatch):
    monkeypatch.setattr("finetune.commands.benchmark.subprocess", forked_subprocess())
    cli(
        "benchmark",
        "--data.root",
        colours,
        *SMALL,
        "--repeats",
        "1",
        "--devices",
        "1,2",
        "--output",
        "out.json",
    )
    rows = json.loads(Path("out.json").read_text())["scaling"]
    assert [row["devices"] for row in rows] == [1, 2]
    assert rows[0]["efficiency"] == 1 and rows[1]["rate"] > 0
    out = capsys.readouterr().out
    assert "\n1 device: " in out and "\n2 devices: " in out
    assert [path.name for path in Path().iterdir()] == ["out.json"]


@pytest.mark.slow
def test_torch_was_left_as_it_was(cli, colours):
    before = torch.get_default_dtype()
    cli(
        "benchmark",
        "--data.root",
        colours,
        *SMALL,
        "--trainer.precision",
        "64-true",
        "--repeats",
        "1",
    )
    assert torch.get_default_dtype() == before
