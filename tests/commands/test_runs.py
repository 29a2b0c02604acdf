"""`finetune runs`: the table, JSON, and the question of `rm` before it deletes."""

import json
from pathlib import Path

import numpy as np
import pytest
from promise import promise
from rich.console import Console
from run_folders import write_run

from finetune.commands import runs as runs_module


@pytest.fixture
def run(tmp_path) -> Path:
    run = write_run(tmp_path / "runs/fit/version_0", [0, 1, 2, 0], np.eye(3)[[0, 1, 2, 1]])
    (run / "checkpoints").mkdir()
    (run / "checkpoints/best.ckpt").write_bytes(b"x" * 2_000_000)
    return run


@promise("runs")
def test_table(run, cli, capsys, tmp_path):
    cli("runs")
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["when", "data", "network", "epochs"]
    assert "resnet18" in row and "test  75.0 % (30.1–95.4)" in row
    assert "2.0 MB" in row and "finished" in row and "runs/fit/version_0" in row
    cli("runs", tmp_path / "runs", "--json", "--sort", "accuracy")
    (plain,) = json.loads(capsys.readouterr().out)
    assert plain["accuracy"] == 0.75 and plain["folder"] == str(run)
    (run / "seconds.json").write_text("{")
    cli("runs")
    assert "seconds.json is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 130])
def test_a_narrow_terminal_shows_complete_folders(run, cli, capsys, monkeypatch, width):
    monkeypatch.setattr(runs_module, "table_console", lambda _: Console(width=width))
    cli("runs")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    header = next(i for i, line in enumerate(lines) if line.startswith("when"))
    place = lines[header].index("folder")
    assert "".join(line[place:].strip() for line in lines[header + 1 :]) == "runs/fit/version_0"


def test_there_may_be_no_runs(cli, capsys, tmp_path):
    cli("runs", tmp_path)
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"


@promise("runs-rm")
def test_rm_keeps_files_of_the_user(run, cli, capsys):
    (run / "notes.txt").write_text("mine")
    cli("runs", "rm", "--yes", run, f"{run}/")
    assert f"kept {run}/notes.txt" in capsys.readouterr().out
    assert [path.name for path in run.rglob("*")] == ["notes.txt"]


def test_rm_leaves_nothing_of_a_fit(run_to_go_on, cli):
    (run_to_go_on / ".finetune").touch()
    cli("runs", "rm", "--yes", run_to_go_on)
    assert not run_to_go_on.exists()


def test_compare_takes_several_runs(run, cli, capsys, tmp_path):
    other = write_run(tmp_path / "other", [0, 1, 2, 0], np.eye(3)[[0, 1, 2, 0]])
    (run / "checkpoints/best.ckpt").unlink()
    cli("compare", run, other)
    assert "comparison.html" in capsys.readouterr().out
