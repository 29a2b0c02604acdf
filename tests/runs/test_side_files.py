"""Damaged side files of a run: reported if they are needed, renamed if the run continues without them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from colours import QUICKEST

from finetune.cli import run as run_command
from finetune.runs.side_files import (
    are_names,
    are_seconds,
    continue_side_file,
    is_about,
    read_side_file,
)

FILES = ("seconds.json", "about.json", "loggers.json", "steps.csv", "metrics.csv", "skipped.txt")
DAMAGE = {
    "empty": b"",
    "cut": b'{"training": 1',
    "bytes": b"\xff\xfe\x00\x01",
    "list": b"[1]",
    "values": b'{"training": "long", "splits": 3, "TensorBoardLogger": 4, "lines": 5}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("is_sound", [are_seconds, is_about, are_names])
def test_a_damaged_file_is_named_and_set_aside(tmp_path, caplog, is_sound, damage):
    path = tmp_path / "some.json"
    for aside in ("some.json.damaged", "some.json.damaged-2"):
        path.write_bytes(DAMAGE[damage])
        with pytest.raises(ValueError, match=f"^{path} is damaged: "):
            read_side_file(path, is_sound)
        caplog.clear()
        assert continue_side_file(path, is_sound, "something is lost") == {}
        (line,) = caplog.messages
        assert line.startswith(f"{path} is damaged: ") and "\n" not in line
        assert line.endswith(f"; it is now called {aside}, and something is lost")
        assert not path.exists() and (tmp_path / aside).read_bytes() == DAMAGE[damage]
    assert continue_side_file(path, is_sound, "") == {}  # the control: a file that is not there


@pytest.mark.parametrize("seconds", ["NaN", "-1", "Infinity", "true", "null", '"3"'])
def test_seconds_are_numbers(tmp_path, seconds):
    path = tmp_path / "seconds.json"
    path.write_text(f'{{"training": {seconds}}}')
    with pytest.raises(ValueError, match="is damaged: its content is not what a run writes there"):
        read_side_file(path, are_seconds)
    path.write_text('{"training": 3.5}')
    assert read_side_file(path, are_seconds) == {"training": 3.5}


def test_a_folder_in_its_place_is_set_aside_too(tmp_path):
    (tmp_path / "seconds.json").mkdir()
    assert continue_side_file(tmp_path / "seconds.json", are_seconds, "") == {}
    assert [path.name for path in tmp_path.iterdir()] == ["seconds.json.damaged"]


@pytest.fixture(scope="module")
def begun(colours, tmp_path_factory) -> Path:
    """A folder with a run of one epoch that has every side file."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as context:
        context.chdir(folder)
        run_command([*command(colours), "--trainer.max_epochs", "1", "--test_after_fit", "false"])
    (folder / "runs/fit/version_0/skipped.txt").touch()
    assert all((folder / "runs/fit/version_0" / name).is_file() for name in FILES)
    return folder


def command(colours: Path) -> list[str]:
    return ["fit", str(colours), *QUICKEST, "--trainer.logger", "TensorBoardLogger"]


def resumed(
    begun: Path, colours: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> Path:
    """Damage all side files of a copy of the run, resume it, and return it."""
    shutil.copytree(begun, folder)
    monkeypatch.chdir(folder)
    run = folder / "runs/fit/version_0"
    if damage is not None:
        for name in FILES:
            (run / name).write_bytes(damage)
    run_command(
        [*command(colours), "--trainer.max_epochs", "2", "--test_after_fit", "false", "--resume"]
    )
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    return run


@pytest.mark.parametrize(
    "damage",
    [pytest.param(name, marks=[] if name == "bytes" else pytest.mark.slow) for name in DAMAGE],
)
def test_a_run_is_resumed_without_them(begun, colours, tmp_path, monkeypatch, caplog, damage):
    run = resumed(begun, colours, tmp_path / "damaged", monkeypatch, DAMAGE[damage])
    aside = {path.name.removesuffix(".damaged") for path in run.glob("*.damaged")}
    assert {"seconds.json", "about.json", "loggers.json"} <= aside
    for name in aside:
        assert (run / f"{name}.damaged").read_bytes() == DAMAGE[damage]
        assert any(f"{name} is damaged: " in line for line in caplog.messages), name
    assert set(json.loads((run / "seconds.json").read_text())) >= {"training"}
    about = json.loads((run / "about.json").read_text())
    assert about["command"] == "" and len(about["went_on_by"]) == 1
    assert (run / "metrics.csv").read_text().splitlines()[-1].startswith("2,")
    run_command(["report", str(run)])
    assert (run / "report.html").is_file()
    if damage == "bytes":
        full = resumed(begun, colours, tmp_path / "whole", monkeypatch, None)
        ours, theirs = (
            torch.load(each / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
            for each in (run, full)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
