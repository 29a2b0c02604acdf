"""A calibration from the validation split to predictions, test and charts: only the checkpoint carries it."""

import csv
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from colours import QUICKEST
from small_fits import data, fit

from finetune import Classifier
from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.system.messages import WrongUsage
from finetune.training import calibration
from finetune.training.calibration import Calibration, Calibrator, read_calibration
from finetune.training.temperature import Temperature
from finetune.training.threshold import Aim, Choice, parse_aim

NAMES = ["blue", "green"]


@pytest.fixture(scope="module")
def two(colours, tmp_path_factory) -> Path:
    """The colours' folder with two classes alone."""
    root = tmp_path_factory.mktemp("two") / "two"
    shutil.copytree(colours, root, ignore=shutil.ignore_patterns("red"))
    return root


@pytest.fixture(scope="module")
def checkpoint(two, tmp_path_factory) -> Path:
    """Of a short fit with a validation split and an aim."""
    images = data(two, val_fraction=0.4, image_size=28)
    pl.seed_everything(0, verbose=False)
    model = Classifier(NAMES, "small_cnn", weights=None)
    model.calibrator.aim = parse_aim("recall:0.9:green", NAMES)
    path = tmp_path_factory.mktemp("fit") / "some.ckpt"
    fit(model, images, max_epochs=2).save_checkpoint(path)
    return path


def changed(path: Path, target: Path, value: object) -> Path:
    """The same checkpoint with another calibration."""
    content = read_checkpoint(path)
    content["finetune"]["calibration"] = value
    torch.save(content, target)
    return target


def predicted(cli, tmp_path: Path, path: Path, images: Path) -> list[dict[str, str]]:
    on_cpu = ("--trainer.accelerator", "cpu")  # TF32 would lose digits
    cli(
        "predict",
        "--ckpt_path",
        path,
        "--data.predict",
        images,
        "--output",
        tmp_path / "out.csv",
        *on_cpu,
    )
    with open(tmp_path / "out.csv", newline="") as file:
        return list(csv.DictReader(file))


def log_ratios(rows: list[dict[str, str]]) -> np.ndarray:
    return np.array([np.log(float(row["p_blue"])) - np.log(float(row["p_green"])) for row in rows])


def test_it_is_what_fits_the_checkpoint_s_own_validation_logits(checkpoint, two, tmp_path):
    found = read_calibration(read_checkpoint(checkpoint))
    images = data(two, val_fraction=0.4)
    val = images.splits["val"]
    bare = Predictor(changed(checkpoint, tmp_path / "bare.ckpt", None))
    p = bare([decode(path) for path in val.paths])
    metric = Temperature()
    metric.update(torch.from_numpy(p).log(), torch.from_numpy(val.targets.labels))
    assert found.num_images == len(val) == 15
    # Batch norm is fused into convolutions in a fit's validation: logits differ by rounding.
    assert found.temperature == pytest.approx(metric.compute().item(), rel=1e-4)
    assert abs(found.temperature - 1) > 0.01  # else the tests below would say nothing
    assert (
        found.choice is not None and found.choice.value is not None and found.choice.reached >= 0.9
    )
    scaled = Predictor(checkpoint)([decode(path) for path in val.paths])
    is_reported = scaled[:, 1] >= found.choice.value
    assert found.choice.reached == pytest.approx(is_reported[val.targets.labels == 1].mean())


@pytest.mark.slow
def test_predict_scales_and_decides_by_the_checkpoint_alone(checkpoint, two, cli, tmp_path):
    found = read_calibration(read_checkpoint(checkpoint))
    rows = predicted(cli, tmp_path, checkpoint, two / "test")
    bare = predicted(cli, tmp_path, changed(checkpoint, tmp_path / "bare.ckpt", None), two / "test")
    # Seven digits are written of probabilities near a half.
    np.testing.assert_allclose(
        log_ratios(rows), log_ratios(bare) / found.temperature, rtol=0, atol=2e-6
    )
    assert np.abs(log_ratios(rows) - log_ratios(bare)).max() > 1e-4  # the control
    assert found.choice is not None and found.choice.value is not None
    for row in rows:
        assert row["class"] == NAMES[float(row["p_green"]) >= found.choice.value]
        assert row["probability"] == row[f"p_{row['class']}"]
    predictor = Predictor(checkpoint)
    p = predictor([decode(row["path"]) for row in rows])
    np.testing.assert_allclose(p[:, 1], [float(row["p_green"]) for row in rows], rtol=0, atol=2e-6)
    assert [NAMES[k] for k in predictor.decide(p)] == [row["class"] for row in rows]


@pytest.mark.slow
def test_test_reports_the_error_before_and_after_and_what_a_threshold_decides(
    checkpoint, two, cli, tmp_path, capsys
):
    given = {"temperature": 0.25, "num_pictures": 16, "threshold": None}
    # green is never said
    threshold = {"measure": "f1", "least": None, "positive": 1, "value": 1.0, "reached": 0.5}
    results = {}
    for name, value in {
        "bare": None,
        "scaled": given,
        "never": {**given, "threshold": threshold},
    }.items():
        capsys.readouterr()
        path = changed(checkpoint, tmp_path / f"{name}.ckpt", value)
        cli("test", "--ckpt_path", path, "--trainer.default_root_dir", tmp_path / name)
        results[name] = json.loads(next((tmp_path / name).rglob("test.json")).read_text())
        results[name]["lines"] = capsys.readouterr().out.splitlines()
    bare = results["bare"]
    scaled = results["scaled"]
    never = results["never"]
    before, after = "test/calibration_error_before_scaling", "test/calibration_error"
    assert before not in bare and bare["calibration"] is None
    assert any(line.startswith("no temperature: ") for line in bare["lines"])
    assert (
        scaled[before] == pytest.approx(bare[after], abs=1e-6)
        and abs(scaled[after] - bare[after]) > 1e-3
    )
    assert scaled["calibration"] == given
    assert (
        f"{before} {scaled[before]:.4f}" in scaled["lines"]
        and f"{after} {scaled[after]:.4f}" in scaled["lines"]
    )
    assert "temperature 0.250, fitted on 16 validation images" in scaled["lines"]
    for name in ("test/accuracy", "test/loss", "test/f1", "confusion_matrix"):
        assert scaled[name] == bare[name]
    assert never["confusion_matrix"] == [[10, 0], [10, 0]] and never["test/accuracy"] == 0.5
    assert never["test/loss"] == bare["test/loss"] and never[after] == scaled[after]
    assert "threshold 1 for green: f1 0.500 on 16 validation images" in never["lines"]


def test_fit_says_what_it_chose_and_keeps_it(two, cli, tmp_path, capsys):
    options = ["--data.root", two, *QUICKEST, "--data.val_fraction", 0.4, "--threshold", "f1:green"]
    cli("fit", *options)
    out = capsys.readouterr().out
    kept = read_calibration(read_checkpoint(tmp_path / "runs/fit/version_0/checkpoints/best.ckpt"))
    assert kept.aim == Aim("f1", None, 1)
    assert (
        kept.describe(NAMES)[0] in out and kept.describe(NAMES)[1] in out and "for green: f1" in out
    )
    assert "threshold: f1:green" in (tmp_path / "runs/fit/version_0/config.yaml").read_text()
    assert "val/temperature" in (tmp_path / "runs/fit/version_0/metrics.csv").read_text()


def test_without_a_validation_split_nothing_is_fitted_and_that_is_reported(
    two, cli, tmp_path, capsys, checkpoint
):
    options = ["--data.root", two, *QUICKEST, "--data.val_fraction", 0]
    cli("fit", *options, "--model.weights", checkpoint)  # whose temperature is not inherited
    assert "no temperature: nothing was validated, " in capsys.readouterr().out
    for name in ("best", "last"):
        path = tmp_path / f"runs/fit/version_0/checkpoints/{name}.ckpt"
        assert read_calibration(read_checkpoint(path)) == Calibration()


def test_weights_that_moved_since_the_validation_have_no_calibration(two, tmp_path):
    images = data(two, val_fraction=0.4, image_size=28)
    trainer = fit(
        Classifier(NAMES, "small_cnn", weights=None), images, max_epochs=2, max_steps=4
    )  # three steps an epoch
    trainer.save_checkpoint(tmp_path / "inside.ckpt")
    assert read_calibration(read_checkpoint(tmp_path / "inside.ckpt")) == Calibration()


@pytest.mark.slow
def test_a_run_that_continues_ends_with_the_calibration_of_one_that_was_left_alone(
    two, cli, tmp_path
):
    options = ["--data.root", two, *QUICKEST, "--data.val_fraction", 0.4]
    options += ["--threshold", "f1", "--test_after_fit", "false"]
    cli("fit", *options, "--trainer.max_epochs", 2, "--trainer.default_root_dir", "whole")
    cli("fit", *options, "--trainer.max_epochs", 1, "--trainer.default_root_dir", "parts")
    cli(
        "fit",
        *options,
        "--trainer.max_epochs",
        2,
        "--trainer.default_root_dir",
        "parts",
        "--resume",
    )
    full, parts = (
        read_calibration(read_checkpoint(tmp_path / f"{name}/fit/version_0/checkpoints/last.ckpt"))
        for name in ("whole", "parts")
    )
    assert full == parts and full.choice is not None and full.num_images == 15


def test_an_aim_that_is_missed_is_an_error_after_the_test(two, cli, tmp_path):
    options = [
        "--data.root",
        two,
        *QUICKEST,
        "--data.val_fraction",
        0.4,
        "--threshold",
        "precision:0.99",
    ]
    with (
        patch.object(calibration, "choose", lambda *_: Choice(None, 0.75)),
        pytest.raises(
            ValueError,
            match="no threshold reaches precision 0.99 for blue: the highest is 0.75, on .*; ",
        ),
    ):
        cli("fit", *options)
    run = tmp_path / "runs/fit/version_0"
    assert (run / "test.json").exists() and read_calibration(
        read_checkpoint(run / "checkpoints/best.ckpt")
    ).aim


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--data.val_fraction", 0, "--threshold", "f1"],
            "chosen on validation images, and there is no",
        ),
        (
            ["--trainer.limit_val_batches", 0, "--threshold", "f1"],
            "images, and trainer.limit_val_batches is 0",
        ),
        (["--threshold", "f1:red"], "no class 'red'; there are blue and green"),
        (
            ["--trainer.max_steps", 1, "--threshold", "f1"],
            "the fit ends after 1 batches, before the first validation",
        ),
        (
            [
                "--data.batch_size",
                1,
                "--data.val_fraction",
                0.4,
                "--trainer.limit_val_batches",
                1,
                "--threshold",
                "f1",
            ],
            "both classes, there is none of green in the 1 that trainer.limit_val_batches leaves",
        ),
    ],
)
def test_a_threshold_that_can_t_be_chosen_is_reported_before_training(
    two, cli, tmp_path, options, words
):
    with pytest.raises(ValueError, match=words):
        cli("fit", "--data.root", two, *QUICKEST, *options)
    assert not (tmp_path / "runs/fit").exists()


def test_an_aim_that_is_none_is_wrong_usage(two, cli, tmp_path):
    with pytest.raises(WrongUsage, match="--threshold f2: pass accuracy, f1"):
        cli("fit", "--data.root", two, *QUICKEST, "--threshold", "f2")
    assert not (tmp_path / "runs/fit").exists()


def test_one_validation_image_and_images_of_one_class():
    for labels in ([0], [1, 1, 1]):
        fits = Calibrator()
        fits.aim = Aim("f1", None, 0)
        fits.update(torch.tensor([[2.0, -1.0]]).repeat(len(labels), 1), torch.tensor(labels))
        found = fits.take()
        assert 0.1 < found.temperature < 10 and found.num_images == len(labels)
        assert found.choice == Choice(
            None, None
        ) and "of one class" in found.describe_unreached_aim(NAMES)
        assert read_calibration(checkpoint_with(found.as_plain())) == found
        assert found.decide(torch.tensor([[0.7, 0.3], [0.2, 0.8]])).tolist() == [0, 1]


def test_it_starts_again_after_each_validation():
    fits = Calibrator()
    for logits in (torch.tensor([[9.0, 0.0]]), torch.tensor([[0.5, 0.0]])):
        fits.update(logits.repeat(20, 1), torch.arange(20) % 2)
        last = fits.take()
    fresh = Calibrator()
    fresh.update(torch.tensor([[0.5, 0.0]]).repeat(20, 1), torch.arange(20) % 2)
    assert fresh.take() == last and last.num_images == 20


def test_logits_that_are_no_numbers_fit_nothing():
    fits = Calibrator()
    fits.update(torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.int64))
    assert fits.take() == Calibration()


def checkpoint_with(value: object, names: tuple[str, ...] = ("a", "b")) -> dict:
    return {"finetune": {"calibration": value}, "hyper_parameters": {"class_names": list(names)}}


def test_what_is_written_is_read_and_earlier_versions_had_nothing():
    assert (
        read_calibration({"finetune": {}})
        == read_calibration(checkpoint_with(None))
        == Calibration()
    )
    for written in (
        Calibration(1.5, 16),
        Calibration(1.5, 16, Aim("recall", 0.99, 1), Choice(0.25, 1.0)),
        Calibration(1.5, 16, Aim("precision", 0.99, 0), Choice(None, 0.5)),
        Calibration(1.5, 16, Aim("accuracy", None, 0), Choice(None, None)),
    ):
        assert read_calibration(checkpoint_with(written.as_plain())) == written


GOOD = {"measure": "recall", "least": 0.9, "positive": 0, "value": 0.5, "reached": 1.0}
TEMPERATURES = [
    float("nan"),
    float("inf"),
    -1.0,
    0.0,
    1e-300,
    True,
    1,
    "1.0",
    None,
    [1.0] * 10_000,
    torch.ones(()),
]


@pytest.mark.parametrize(
    "value",
    [
        *(
            [],
            "T",
            1.5,
            {},
            {"temperature": 1.0},
            {"temperature": 1.0, "num_pictures": 1, "threshold": None, "x": 1},
        ),
        *({"temperature": t, "num_pictures": 1, "threshold": None} for t in TEMPERATURES),
        *(
            {"temperature": 1.0, "num_pictures": n, "threshold": None}
            for n in (0, -1, 1.0, "1", None, 2**70)
        ),
        *(
            {"temperature": 1.0, "num_pictures": 1, "threshold": GOOD | change}
            for change in (
                *({"measure": m} for m in ("f1", "f2", None, [], {"a": 1})),
                *({"least": v} for v in (None, 2.0, "0.9", float("nan"))),
                *({"positive": v} for v in (2, -1, True, None, 0.0)),
                *({"value": v} for v in (1.5, -0.1, float("nan"), "0.5")),
                *({"reached": v} for v in (None, 1.5, float("nan"))),
                {"more": 1},
            )
        ),
    ],
)
def test_what_no_fit_of_ours_has_written_is_refused_in_a_short_line(value):
    with pytest.raises(ValueError, match="not as `finetune fit` writes them: its") as caught:
        read_calibration(checkpoint_with(value))
    assert len(str(caught.value)) < 200


def test_a_threshold_among_three_classes_is_refused():
    written = Calibration(1.5, 16, Aim("recall", 0.99, 1), Choice(0.25, 1.0)).as_plain()
    with pytest.raises(ValueError, match="of other than two classes"):
        read_calibration(checkpoint_with(written, ("a", "b", "c")))
