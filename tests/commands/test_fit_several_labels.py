"""`finetune fit` on images with several labels: the lines, files and options that differ."""

import json
from pathlib import Path

import pytest
from colours import QUICKEST
from labelled_files import LABELS, draw_labelled

from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.metrics_csv import read_metrics
from finetune.training.calibration import read_calibration
from finetune.training.threshold import LabelAim

QUICK = [*QUICKEST, "--data.val_fraction", "0.25", "--test_after_fit", "false"]
RUN = Path("runs/fit/version_0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_labelled(tmp_path_factory.mktemp("labels"), train=96)


def fit_words(root: Path, *more: str) -> list[str]:
    return ["--data", "labelled_files.LabelledFiles", "--data.root", str(root), *QUICK, *more]


def test_a_fit_reports_the_mean_average_precision(root, cli, capsys, caplog):
    with caplog.at_level("INFO"):
        cli("fit", *fit_words(root, "--trainer.max_epochs", "2", "--threshold", "recall:1"))
    printed = capsys.readouterr()
    assert (
        " labels per image, " in caplog.text and " without any; 4 labels in train: " in caplog.text
    )
    assert printed.err.count("  val/mAP 0.") == 2 and "accuracy" not in printed.out + printed.err
    assert "calibration of each label, fitted on " in printed.out
    assert "thresholds for recall 1: blue 0." in printed.out
    checkpoint = read_checkpoint(RUN / "checkpoints/best.ckpt")
    assert checkpoint["hyper_parameters"]["label_kind"] == "several"
    calibration = read_calibration(checkpoint)
    assert calibration.aim == LabelAim("recall", 1) and len(calibration.thresholds) == 4
    rows = read_metrics(RUN / "metrics.csv")
    assert len(rows) == 2 and float(rows[0]["train/f1_micro"]) >= 0
    columns = [f"val/average_precision/{name}" for name in LABELS]
    assert {"val/mAP", "val/f1_macro", "val/exact_match", *columns} <= set(rows[0])
    assert "val/temperature" not in rows[0]


@pytest.mark.slow
def test_a_fit_continues_and_ends_by_patience(root, cli, caplog):
    cli("fit", *fit_words(root))
    with caplog.at_level("INFO"):
        # nothing gets better
        words = ("--trainer.max_epochs", "9", "--patience", "2", "--lr", "1e-12")
        cli("fit", *fit_words(root, "--resume", *words))
    assert "val/mAP did not improve in --patience 2 validations" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        cli("fit", *fit_words(root, "--resume", *words))
    assert "is finished, with early stopping, patience 2" in caplog.text


@pytest.mark.slow
def test_the_exact_head_and_the_start(root, cli, caplog):
    weights = ("--model.head_init", "probe")
    with caplog.at_level("INFO"):
        cli("fit", *fit_words(root, *weights, "--freeze", "backbone"))
        cli("fit", *fit_words(root, *weights))
    assert "the head is solved exactly, as the logistic regression on its features: " in caplog.text
    assert "strength 1.0e-0" in caplog.text and "cross-validated mAP 0." in caplog.text
    assert ", val/mAP 0." in caplog.text  # of the start
    kept = json.loads(Path("runs/fit/version_1/kept_weights.json").read_text())
    assert all("mAP" in candidate for candidate in kept["candidates"])
