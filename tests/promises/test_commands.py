"""The command line as a user meets it: help, configs, run folders, predictions, a list of images for all processes."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from colours import QUICKEST
from processes import finetune

from finetune import __version__
from finetune.cli import SECTIONS, main
from finetune.runs.metrics_csv import read_metrics

UNTESTED = ("--test_after_fit", "false")
ON_CPU = ("--trainer.accelerator", "cpu")


@pytest.fixture(scope="session")
def fitted(fitted_runs) -> Path:
    """A finished run; to be read only."""
    return fitted_runs.single


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def is_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def console_script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Start the script that `pip install` puts next to the interpreter."""
    command = [str(Path(sys.executable).with_name("finetune")), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_help_lists_everything_and_version_and_help_are_quick(tmp_path):
    seconds = []
    for option in ("--version", "--help"):
        before = os.times()
        result = console_script(option, cwd=tmp_path)
        after = os.times()  # processor time: on a busy machine the clock also counts waiting
        user = after.children_user - before.children_user
        seconds.append(user + after.children_system - before.children_system)
        assert result.returncode == 0
        if option == "--version":
            assert result.stdout == f"finetune {__version__}\n"
    for commands in SECTIONS.values():
        for name, text in commands.items():
            assert re.search(rf"^  {name} +{re.escape(text)}$", result.stdout, re.M)
    assert min(seconds) < 0.5  # half of what importing torch alone takes


def test_every_run_has_a_folder_of_its_own(colours, cli, run, tmp_path):
    first = run()
    cli("fit", "--data.root", colours, *QUICKEST)
    for folder in (first, first.with_name("version_1")):
        files = sorted(
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        )
        assert files == [
            *("checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml"),
            *("metrics.csv", "run.json", "steps.csv", "test.json", "test_predictions.csv"),
        ]
    result = json.loads((folder / "test.json").read_text())
    assert sum(map(sum, result["confusion_matrix"])) == 30
    steps = read_metrics(folder / "steps.csv")
    common = {"val/accuracy", "lr-AdamW/head"}
    assert {"step", "epoch", "train/loss_epoch", "test/accuracy", *common} <= set(steps[0])
    assert result["test/accuracy"] in [float(row["test/accuracy"] or -1) for row in steps]
    epochs = read_metrics(folder / "metrics.csv")
    assert [row["epoch"] for row in epochs] == [str(i + 1) for i in range(len(epochs))] != []
    for row in epochs:
        # of a class that is never predicted
        empty = [name for name, value in row.items() if not value]
        assert all(name.startswith("val/precision/") for name in empty)
        assert float(row["seconds"]) > 0
        assert {"train/loss", "train/accuracy", "val/loss", *common} <= set(row)


@pytest.mark.slow
def test_the_saved_config_can_be_run_again(fitted, cli, tmp_path):
    saved = fitted / "config.yaml"
    cli("fit", "--config", saved, "--out", "again", *UNTESTED)
    again = tmp_path / "again/fit/version_0"
    a, b = (yaml.safe_load(path.read_text()) for path in (saved, again / "config.yaml"))
    assert a["model"] == b["model"]
    assert a["data"] == b["data"]
    assert is_equal(weights_of(fitted), weights_of(again))


def test_a_checkpoint_alone_predicts(fitted, colours, cli, tmp_path, capsys):
    shutil.copy(fitted / "checkpoints/best.ckpt", tmp_path / "only.ckpt")
    images = tmp_path / "photos"
    shutil.copytree(colours / "test", images)
    (images / "broken.jpg").write_text("no image")
    cli("predict", "--ckpt_path", "only.ckpt", "--data.predict", "photos", *ON_CPU)
    rows = rows_of(tmp_path / "runs/predict/version_0/predictions.csv")
    assert [row["path"] for row in rows] == sorted(
        str(p.relative_to(tmp_path)) for p in images.rglob("*.*")
    )
    by_class = ["p_blue", "p_green", "p_red"]
    assert list(rows[0]) == ["path", "class", "probability", *by_class, "familiar", "error"]
    (bad,) = [row for row in rows if row["error"]]
    assert (bad["path"], bad["class"]) == ("photos/broken.jpg", "")
    for row in rows:
        if not row["error"]:
            by_class = {name: float(row[f"p_{name}"]) for name in ("blue", "green", "red")}
            assert sum(by_class.values()) == pytest.approx(1, abs=1e-6)
            assert row["class"] == max(by_class, key=lambda name: by_class[name])
    assert re.search(r"31 images: .*1 unreadable", capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_and_images_named_by_position(fitted, colours, cli, tmp_path, capsys):
    one = colours / "test/red/00.png"
    two = colours / "test/red/01.png"
    more = colours / "test/blue"
    cli("predict", fitted, one, two, more / "*.png", "--out", "new/o.csv", "--devices", "1")
    found = [row["path"] for row in rows_of(tmp_path / "new/o.csv")]
    assert found == [str(path) for path in (one, two, *sorted(more.glob("*.png")))]
    capsys.readouterr()
    cli("predict", fitted, one, "--out", "one.csv")
    (row,) = rows_of(tmp_path / "one.csv")
    reported = f"{one}: {row['class']}, probability {float(row['probability']):.4f}"
    reported += f"; familiar {float(row['familiar']):.2f}"
    assert capsys.readouterr().out == f"{reported}\npredictions in one.csv\n"
    expected = json.loads((fitted / "test.json").read_text())["test/accuracy"]
    cli("test", fitted, colours, "--workers", "0")
    assert f"test/accuracy {expected:.4f}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_many_images_reach_the_processes_of_other_devices(fitted, colours, tmp_path):
    """The system takes no argument of more than 128 KiB; a shell's glob can be longer."""
    folder = tmp_path / ("a" * 200) / ("b" * 200)
    shutil.copytree(colours / "test/red", folder)
    names = sorted(map(str, folder.iterdir())) * 32
    assert len(" ".join(names)) > 2**17
    line = ["predict", fitted, *names, "--devices", 2, "--workers", 0, "--out", "o.csv", *ON_CPU]
    result = finetune(*line, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("320 images: ")


@pytest.mark.slow
def test_test_and_validate_print_their_result(fitted, colours, cli, tmp_path, capsys):
    checkpoint = fitted / "checkpoints/best.ckpt"
    expected = json.loads((fitted / "test.json").read_text())["test/accuracy"]
    # the data it was trained on
    cli("test", "--ckpt_path", checkpoint, *ON_CPU)
    assert f"\ntest/accuracy {expected:.4f}\n" in "\n" + capsys.readouterr().out
    cli("validate", "--ckpt_path", checkpoint, *ON_CPU)
    assert re.search(r"^val/accuracy \d\.\d{4}$", capsys.readouterr().out, re.M)
    # A config that says otherwise does not change what the checkpoint is; its data may be elsewhere.
    Path("other.yaml").write_text(
        "model: {backbone: resnet50}\ndata: {class_path: finetune.ImageFolderData}\n"
    )
    moved = tmp_path / "moved"
    shutil.copytree(colours / "test", moved / "test")
    words = ("--config", "other.yaml", "--ckpt_path", checkpoint, "--data.root", moved)
    cli("test", *words, *ON_CPU)
    assert f"\ntest/accuracy {expected:.4f}\n" in "\n" + capsys.readouterr().out


def test_a_list_of_which_no_image_can_be_read_is_a_failure(fitted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.png").write_text("no image")
    Path("list.txt").write_text("a.png\nb.png\n")
    words = ["--ckpt_path", str(fitted / "checkpoints/best.ckpt"), "--data.predict", "list.txt"]
    with pytest.raises(SystemExit) as caught:
        main(["predict", *words, "--output", "out.CSV"])
    shown = capsys.readouterr()
    assert caught.value.code == 1 and "2 images: 2 unreadable" in shown.out
    assert "out.CSV has the reason" in shown.err.splitlines()[-1]
    assert [row["path"] for row in rows_of(Path("out.CSV")) if row["error"]] == ["a.png", "b.png"]


def test_output_that_is_closed_is_no_failure(tmp_path):
    command = f"{sys.executable} -m finetune --version >&-"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
