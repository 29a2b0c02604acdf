"""Exports of every kind of checkpoint: small grey images, double precision, a temperature and a threshold."""

import csv
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from colours import QUICKEST, draw_colours
from data_files import write_unpacked
from small_fits import scramble

from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint

pytestmark = pytest.mark.slow

BEST = "runs/fit/version_0/checkpoints/best.ckpt"


def assert_all_agree(cli, best: str, images: list[np.ndarray]) -> None:
    """Export a checkpoint in each way, and hold the files against it."""
    scramble(Path(best))
    own = Predictor(best)
    for kind in ("onnx", "safetensors"):
        name = f"some.{kind}"
        cli("export", best, "--output", name, "--format", kind)
        np.testing.assert_allclose(Predictor(name)(images), own(images), rtol=0, atol=2e-6)
    assert own(images).std(axis=0).max() > 1e-4  # they are distinguished


def test_lenet_on_grey_clothes(cli, tmp_path):
    root = write_unpacked(tmp_path / "clothes")
    few = [
        "--trainer.max_epochs",
        2,
        "--trainer.accelerator",
        "cpu",
        "--data.num_workers",
        0,
        "--report",
        "false",
    ]
    cli(
        "fit",
        "--config",
        "fashion_mnist_lenet.yaml",
        "--data.root",
        root,
        *few,
        "--data.batch_size",
        20,
    )
    grey = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1), np.uint8).repeat(3, axis=3)
    grey[2:] //= 8
    assert_all_agree(
        cli, BEST, [*grey, np.full((90, 61, 3), 250, np.uint8), np.zeros((3, 200, 3), np.uint8)]
    )
    cli(
        "test",
        "--ckpt_path",
        "some.onnx",
        "--data.class_path",
        "finetune.FashionMNIST",
        "--data.root",
        root,
    )
    assert json.loads(Path("runs/test/version_0/test.json").read_text())["test/accuracy"] >= 0


def test_double_precision(colours, cli, tmp_path):
    cli(
        "fit",
        "--data.root",
        colours,
        *QUICKEST,
        "--trainer.precision",
        "64-true",
        "--test_after_fit",
        "false",
    )
    state = read_checkpoint(BEST)["state_dict"]
    assert "float64" in {str(value.dtype).removeprefix("torch.") for value in state.values()}
    assert_all_agree(
        cli, BEST, [decode(str(path)) for path in sorted((colours / "test").glob("*/0[0-3].png"))]
    )


@pytest.fixture
def two(tmp_path) -> Path:
    root = draw_colours(tmp_path / "two", train=20, test=10)
    for split in ("train", "test"):
        for path in (root / split / "red").iterdir():
            path.unlink()
        (root / split / "red").rmdir()
    return root


def test_a_temperature_and_a_threshold(two, cli, tmp_path):
    cli(
        "fit",
        "--data.root",
        two,
        *QUICKEST,
        "--data.val_fraction",
        0.4,
        "--threshold",
        "recall:0.9:green",
    )
    scramble(Path(BEST))  # or all images would be ties
    calibration = Predictor(BEST).calibration
    assert (
        calibration.temperature != 1
        and calibration.choice is not None
        and calibration.choice.value is not None
    )
    cli("export", BEST, "--output", "some.onnx", "--verify_on", two / "test")
    about = json.loads(Path("some.onnx.json").read_text())
    assert about["temperature"] == calibration.temperature
    assert (
        about["calibration"] == calibration.as_plain()
        and about["calibration"]["threshold"]["positive"] == 1
    )
    for name, path in (("own", BEST), ("file", "some.onnx")):
        cli(
            "predict",
            "--ckpt_path",
            path,
            "--data.predict",
            two / "test",
            "--output",
            f"{name}.csv",
        )
    own, file = (
        list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
        for name in ("own", "file")
    )
    assert [row["class"] for row in own] == [row["class"] for row in file] and len(own) == 20
    session = onnxruntime.InferenceSession("some.onnx", providers=["CPUExecutionProvider"])
    prepare = Predictor(BEST).prepare
    for row in own:  # a program decides as the JSON says
        image = prepare(decode(row["path"]))
        green = session.run(["probabilities"], {"images": image[None]})[0][0][1]
        assert float(green) == pytest.approx(float(row["p_green"]), abs=1e-5)
        says = "green" if green >= about["calibration"]["threshold"]["value"] else "blue"
        assert (
            says == row["class"] or abs(green - about["calibration"]["threshold"]["value"]) < 1e-5
        )
