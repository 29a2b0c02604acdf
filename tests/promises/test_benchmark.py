"""`finetune benchmark`: its measurements, and that it leaves no files."""

import json
from pathlib import Path

import pytest
import torch
from colours import QUICKEST
from processes import forked_subprocess

SMALL = [*QUICKEST, "--backbone", "lenet", "--epochs", "2000", "--repeats", "1"]

pytestmark = pytest.mark.slow


def test_benchmark_measures_a_fit_and_leaves_nothing_but_its_output(cli, colours, capsys):
    paths = sorted((colours / "train").rglob("*.png"))
    rows = [f"{path},{path.parent.name}" for path in paths]
    Path("images.csv").write_text("\n".join(["path,label", *rows]))
    cli("benchmark", "images.csv", *SMALL, "--precision", "64-true", "--out", "out.json")
    assert {path.name for path in Path().iterdir()} == {"images.csv", "out.json"}
    found = json.loads(Path("out.json").read_text())
    assert found["precision"] == "64-true" and found["batch_size"] == 16
    assert len(found["seconds"]) == 1 and found["seconds"][0] > 0
    assert all(0 <= share < 1 for share in found["waited"])
    assert " images/s, n = 1" in capsys.readouterr().out
    assert torch.get_default_dtype() == torch.float32


def test_benchmark_compares_numbers_of_devices(cli, colours, capsys, monkeypatch):
    monkeypatch.setattr("finetune.distributed.child_command.subprocess", forked_subprocess())
    cli("benchmark", colours, *SMALL, "--devices", "1,2", "--out", "out.json")
    rows = json.loads(Path("out.json").read_text())["scaling"]
    assert [row["devices"] for row in rows] == [1, 2]
    assert rows[0]["efficiency"] == 1 and rows[1]["rate"] > 0
    out = capsys.readouterr().out
    assert "\n1 device: " in out and "\n2 devices: " in out
    assert [path.name for path in Path().iterdir()] == ["out.json"]
