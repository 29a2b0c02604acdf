"""The start and the end of a fit: its name, what it keeps and tests, and a fit that a bug has ended."""

import json
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from colours import QUICKEST
from promise import promise

from finetune.cli import main
from finetune.fitting import decide
from finetune.fitting import fit as fit_module
from finetune.runs import run_lock
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.run_dir import RunDir
from finetune.system.messages import WrongUsage
from finetune.training.classifier import Classifier

CPU = ("--trainer.accelerator", "cpu", "--workers", 0)
NO_TEST = ("--test_after_fit", "false")


@pytest.fixture
def fit(cli: Callable[..., None], colours: Path) -> Callable[..., None]:
    """`finetune fit` in this process, which holds no run afterwards."""

    def run(*arguments: object) -> None:
        try:
            cli("fit", *arguments)
        finally:
            run_lock.release()

    return run


def find_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "has_result", lambda folder: False)


@promise("run-name", controls=[find_no_run])
def test_resume_with_name_continues_the_named_run(fit, colours, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    fit(colours, *QUICKEST, *NO_TEST, "--name", "exp1", "--resume")
    assert "found no run runs/fit/exp1" in caplog.text
    # a run without a test ends with its validation accuracy
    out = capsys.readouterr().out
    assert "validation accuracy " in out and "run in runs/fit/exp1" in out
    fit("--resume", "--name", "exp1", "--trainer.max_epochs", "2")
    assert len((tmp_path / "runs/fit/exp1/metrics.csv").read_text().splitlines()) == 3
    fit("--resume", "--trainer.max_epochs", "3")  # it is the newest
    assert [path.name for path in (tmp_path / "runs/fit").iterdir()] == ["exp1"]
    about = json.loads((tmp_path / "runs/fit/exp1/run.json").read_text())
    assert about["began"] < about["ended"] and len(about["went_on_by"]) == 2
    # its config starts a run of its own
    fit("--config", "runs/fit/exp1/config.yaml")
    assert (tmp_path / "runs/fit/version_0").is_dir()


def keep_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "drop_last", lambda run: 0)


@promise("keep-last", controls=[keep_last])
def test_keep_last_false_leaves_a_small_run_that_is_not_resumed(fit, cli, colours, tmp_path):
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
    cli("test", small, *CPU)


def test_a_fit_tests_the_best_checkpoint(colours, cli, tmp_path, monkeypatch):
    """Here that of the first epoch of three; the control: the last one's result is another."""
    lowest = iter([0.0, 2.0, 2.0])
    monkeypatch.setattr("finetune.runs.model_checkpoint.lowest_acceptable", lambda *_: next(lowest))
    cli("fit", colours, *QUICKEST, "--epochs", 3)
    folder = tmp_path / "runs/fit/version_0"
    paths = {name: folder / f"checkpoints/{name}.ckpt" for name in ("best", "last")}
    assert [read_checkpoint(path)["epoch"] for path in paths.values()] == [0, 2]
    losses = []
    for i, path in enumerate(paths.values()):
        cli("test", path, *CPU)
        result = json.loads((tmp_path / f"runs/test/version_{i}/test.json").read_text())
        losses.append(result["test/loss"])
    result = json.loads((folder / "test.json").read_text())
    assert result["test/loss"] == losses[0] != losses[1]
    assert result["checkpoint"].endswith("best.ckpt")


@pytest.mark.slow
def test_resume_with_more_epochs_tests_again_and_keeps_no_result_of_the_shorter_run(cli, run):
    folder = run()
    result, predictions = folder / "test.json", folder / "test_predictions.csv"
    result.write_text("of the best after one epoch")
    cli("fit", "--resume", folder)  # finished: nothing is done
    assert result.read_text() == "of the best after one epoch"
    # as if the run had been prolonged, and killed before its test
    RunDir(folder).update(ended=None)
    cli("fit", "--resume", folder)
    assert "test/accuracy" in result.read_text()
    cli("fit", "--resume", folder, "--epochs", 2, *NO_TEST)
    assert not result.exists() and not predictions.exists()
    cli("fit", "--resume", folder, "--test_after_fit", "true")
    assert "test/accuracy" in result.read_text() and predictions.exists()


def test_a_full_disk_keeps_the_result_of_the_best_checkpoint_that_stays(cli, run):
    folder = run()
    before = [(folder / name).read_bytes() for name in ("test.json", "test_predictions.csv")]
    best = (folder / "checkpoints/best.ckpt").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))
    try:
        with pytest.raises(OSError, match="could not be written"):
            cli("fit", "--resume", folder, "--epochs", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (folder / "checkpoints/best.ckpt").read_bytes() == best
    assert [
        (folder / name).read_bytes() for name in ("test.json", "test_predictions.csv")
    ] == before
    assert RunDir(folder).facts.test.num_images == 30


@pytest.mark.slow
def test_patience_ends_a_fit(colours, cli, tmp_path, caplog):
    unlearned = ["fit", colours, *QUICKEST, "--lr", "1e-12", "--epochs", 20, "--patience", 2]
    cli(*unlearned)
    assert any("after epoch 3" in text and "--patience 2" in text for text in caplog.messages)
    assert len((tmp_path / "runs/fit/version_0/metrics.csv").read_text().splitlines()) == 4


def test_a_split_that_a_limit_leaves_out_is_reported(colours, cli, tmp_path, caplog, capsys):
    limits = ["--trainer.limit_val_batches", 0, "--trainer.limit_test_batches", "0.0"]
    with caplog.at_level("INFO", "finetune"):
        cli("fit", colours, *QUICKEST, *limits)
    for split in ("val", "test"):
        assert f"{split} is skipped, because trainer.limit_{split}_batches is 0" in caplog.text
    folder = tmp_path / "runs/fit/version_0"
    assert (folder / "checkpoints/best.ckpt").samefile(folder / "checkpoints/last.ckpt")
    assert not (folder / "test.json").exists()
    assert "not calibrated" in capsys.readouterr().out


def test_class_weights_of_a_file_become_values_of_the_run(colours, cli, tmp_path):
    (tmp_path / "weights.yaml").write_text("red: 2\n")
    cli("fit", colours, *QUICKEST, *NO_TEST, "--class_weights", "weights.yaml")
    folder = tmp_path / "runs/fit/version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["class_weights"] == {"red": 2.0}
    (tmp_path / "weights.yaml").unlink()
    cli("fit", "--resume", folder, "--epochs", 2)
    state = read_checkpoint(folder / "checkpoints/last.ckpt")["state_dict"]
    assert state["class_weight"].tolist() == [1, 1, 2]


def test_predict_prints_a_single_image_and_leaves_no_folder(cli, run, colours, capsys, tmp_path):
    image = next(colours.rglob("*.png"))
    folder = run()
    capsys.readouterr()  # of the fit, if this is the first test that needs it
    cli("predict", folder, image, *CPU)
    answer, others = capsys.readouterr().out.splitlines()
    assert answer.startswith(f"{image}: ") and "probability 0." in answer
    assert others.startswith("other classes: ") and others.count(", ") == 1
    assert not (tmp_path / "runs/predict").exists()


def test_a_bug_is_a_traceback_and_a_line_and_its_fit_can_be_resumed(
    colours, tmp_path, monkeypatch, capsys
):
    def fails(self: Classifier) -> None:
        if self.current_epoch == 1:
            math.sqrt(-1.0)

    monkeypatch.chdir(tmp_path)
    line = ["fit", str(colours), *QUICKEST, *NO_TEST, "--epochs", "2"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(Classifier, "on_train_epoch_start", fails)
        main(line)
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert ended.value.code == 1 and "Traceback" in error and "math.sqrt(-1.0)" in error
    assert "math domain error" in last and "This is a bug of finetune" in last
    with pytest.raises(SystemExit) as ended:
        main([*line, "--resume"])
    assert ended.value.code == 0 and "epoch 2/2" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs/fit").iterdir()] == ["version_0"]
