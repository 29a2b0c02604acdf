"""Named runs, runs that keep only their best checkpoint, and commands that leave no folder, by real fits."""

import json
import os
from pathlib import Path

import pytest
from colours import QUICKEST, draw_colours
from promise import promise

from finetune.commands import fit as fit_module
from finetune.runs import newest_run, run_lock
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.system.messages import WrongUsage

NO_TEST = ("--test_after_fit", "false")


@pytest.fixture
def fit(cli, colours):
    """`finetune fit` in this process, which holds no run afterwards."""

    def run(*arguments: object) -> None:
        try:
            cli("fit", *arguments)
        finally:
            run_lock.release()

    return run


def find_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest_run, "is_run_folder", lambda folder: False)


@promise("run-name", controls=[find_no_run])
def test_a_named_run_is_continued_by_its_name(fit, colours, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    fit(colours, *QUICKEST, *NO_TEST, "--name", "exp1", "--resume")
    assert "--resume found no run runs/fit/exp1: a new run begins" in caplog.text
    out = capsys.readouterr().out
    # a run without a test ends with its validation accuracy
    assert (
        "validation accuracy " in out and "95 % interval" in out and "run in runs/fit/exp1" in out
    )
    fit("--resume", "--name", "exp1", "--trainer.max_epochs", "2")
    assert len((tmp_path / "runs/fit/exp1/metrics.csv").read_text().splitlines()) == 3
    fit("--resume", "--trainer.max_epochs", "3")  # it is the newest
    assert [path.name for path in (tmp_path / "runs/fit").iterdir()] == ["exp1"]
    about = json.loads((tmp_path / "runs/fit/exp1/about.json").read_text())
    assert about["began"] < about["ended"] and len(about["went_on_by"]) == 2
    # its config starts a run of its own
    fit("--config", "runs/fit/exp1/config.yaml")
    assert (tmp_path / "runs/fit/version_0").is_dir()


def keep_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "drop_last", lambda run: 0)


@promise("keep-last", controls=[keep_last])
def test_without_last_ckpt(fit, cli, colours, tmp_path, capsys):
    fit(colours, *QUICKEST, *NO_TEST, "--keep_last", "false")
    small = tmp_path / "runs/fit/version_0"
    assert os.listdir(small / "checkpoints") == ["best.ckpt"]
    best = read_checkpoint(small / "checkpoints/best.ckpt")
    weights = sum(value.nbytes for value in best["state_dict"].values())
    assert weights <= (small / "checkpoints/best.ckpt").stat().st_size < 1.3 * weights
    with pytest.raises(WrongUsage, match=r"last\.ckpt was deleted"):
        fit("--resume", small)
    with pytest.raises(WrongUsage, match=r"version_0 cannot be resumed"):
        fit(colours, *QUICKEST, "--resume")
    cli("test", small, "--trainer.accelerator", "cpu", "--data.num_workers", "0")


@pytest.mark.slow
def test_a_single_image_is_predicted_without_a_folder(cli, run_to_go_on, colours, capsys, tmp_path):
    words = ("--trainer.accelerator", "cpu", "--data.num_workers", "0")
    image = sorted(colours.rglob("*.png"))[0]
    cli("predict", run_to_go_on, image, *words)
    answer, others = capsys.readouterr().out.splitlines()
    assert answer.startswith(f"{image}: ") and "probability 0." in answer
    assert others.startswith("other classes: ") and others.count(", ") == 1
    cli("predict", run_to_go_on, image, *words, "--out", "one.csv")
    assert len((tmp_path / "one.csv").read_text().splitlines()) == 2
    cli("predict", run_to_go_on, image.parent, *words, "--out", "several.csv")
    assert (tmp_path / "several.csv").is_file()
    assert not (tmp_path / "runs/predict").exists()
    # several are written to a file of the run
    cli("predict", run_to_go_on, image.parent, *words)
    assert (tmp_path / "runs/predict/version_0/predictions.csv").is_file()


def test_a_fit_that_fails_before_it_has_a_result_leaves_no_folder(fit, tmp_path):
    images = draw_colours(tmp_path / "images", train=8)
    for path in images.rglob("*.png"):
        if path.parent.name == "red":
            path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError):
        fit(images, *QUICKEST)
    assert sorted(str(path) for path in Path("runs").rglob("*")) == []
