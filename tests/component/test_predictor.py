"""A checkpoint or an exported file as a function from images to probabilities."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from colours import QUICKEST
from probabilities import probabilities
from promise import promise
from small_fits import scramble, write_checkpoints
from tiers import sweep
from torch.nn.functional import linear
from torch.utils.data import DataLoader

from finetune import Classifier
from finetune.api.loaded_model import load
from finetune.data.decode import decode
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.exporters import WRITERS
from finetune.inference.joined_checkpoint import calibrated_head
from finetune.inference.onnx_network import ExportedNetwork
from finetune.inference.predictor import Predictor
from finetune.inference.tta import AverageFlip
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import packed
from finetune.training.calibration import Calibration


@pytest.fixture(scope="module")
def checkpoint(colours, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return write_checkpoints(folder, colours, "mobilenet_v3_small", 32) / "plain.ckpt"


@pytest.fixture(scope="module")
def small(colours, tmp_path_factory) -> Path:
    """The calibrated checkpoint of a network that is exported in a fifth of the time."""
    folder = tmp_path_factory.mktemp("small")
    return write_checkpoints(folder, colours, "small_cnn", 28) / "calibrated.ckpt"


@pytest.fixture(scope="module")
def onnx_file(small) -> Path:
    return exported(small, "onnx")


def test_images_are_prepared_as_the_checkpoint_says(checkpoint):
    predictor = Predictor(checkpoint)
    image = np.zeros((40, 80, 3), np.uint8)
    image[:, :20] = 255  # `squash` keeps it, `shorter_side` would crop it away
    for side in (None, 120):
        prepared = predictor.prepare(image, side)
        assert prepared.shape == (side or 32, side or 32, 3) and prepared[:, 0].min() > 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", sweep(["64-true", "bf16-mixed", "bf16-true"], quick=["bf16-mixed"])
)
def test_predictions_in_another_precision(checkpoint, precision, colours):
    image = decode(next((colours / "test").rglob("*.png")))
    plain, other = Predictor(checkpoint), Predictor(checkpoint, precision=precision)
    assert other.precision == precision
    difference = np.abs(probabilities(plain, [image]) - probabilities(other, [image])).max()
    assert 0 < difference < (1e-6 if precision == "64-true" else 0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_predictions_on_a_gpu(checkpoint, precision, colours):
    image = decode(next((colours / "test").rglob("*.png")))
    found = probabilities(Predictor(checkpoint, "cuda", precision), [image])
    tolerance = 0.05 if precision == "bf16-mixed" else 0.02  # as on a CPU
    np.testing.assert_allclose(found, probabilities(checkpoint, [image]), rtol=0, atol=tolerance)


def exported(path: Path, kind: str) -> Path:
    """What `finetune export` would write of a checkpoint if it did not compare both."""
    predictor, target = Predictor(path), path.with_suffix(f".{kind}")
    module = EndToEnd(predictor.model, Calibration.unfitted("single", 3)).eval()
    WRITERS[kind][1](module, predictor.image_size, packed(read_checkpoint(path)), target)
    return target


@pytest.fixture(scope="module")
def damaged(small, tmp_path_factory) -> Path:
    """A checkpoint with one weight of the head that is not a number."""
    path = tmp_path_factory.mktemp("damaged") / "some.ckpt"
    known = torch.load(small, weights_only=True)
    head = [
        name
        for name, value in known["state_dict"].items()
        if name.startswith("network.") and value.dim() == 2
    ][-1]
    known["state_dict"][head][0, 0] = torch.nan
    torch.save(known, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", sweep(["ckpt", "onnx", "safetensors"], quick=["ckpt"]))
def test_probabilities_that_are_not_numbers_are_an_error_that_names_file_and_image(
    damaged, kind, colours, cli, tmp_path
):
    reported = f"{{}}.*some.{kind} .* not finite"
    file = damaged if kind == "ckpt" else exported(damaged, kind)
    image, first = colours / "test", colours / "test/blue/00.png"
    with pytest.raises(ValueError, match=reported.format(first)):
        load(file).predict(image)
    with pytest.raises(ValueError, match=reported.format(first)):
        load(file).predict(first, abstain_below=0.5, on_bad_image="skip")
    with pytest.raises(ValueError, match=reported.format(r"images\[0\] \(and 1 more\)")):
        load(file).predict([first.read_bytes()] * 2)
    for command in (
        ["predict", file, image, "--output", "a.csv"],
        ["predict", file, image, "--abstain_below", "0.5", "--output", "a.csv"],
        ["test", file, colours],
        ["validate", file, colours],
    ):
        with pytest.raises(ValueError, match=reported.format(f"{colours}/.*png")):
            cli(*command)
    written = [path for path in tmp_path.rglob("*") if path.suffix in (".csv", ".json", ".png")]
    assert not [path for path in written if "NaN" in path.read_text()] and not list(
        tmp_path.glob("a.csv")
    )


@pytest.mark.slow  # exports a network
def test_a_graph_of_other_classes_than_it_names_is_reported(onnx_file):
    pixels = torch.zeros(2, 3, 28, 28)
    assert ExportedNetwork(str(onnx_file), 3)(pixels).shape == (2, 3)
    with pytest.raises(ValueError, match="2 classes"):
        ExportedNetwork(str(onnx_file), 2)(pixels)


@promise("nothing-sent")
@pytest.mark.slow  # an interpreter, which waits
def test_onnxruntime_writes_nothing_of_its_own(onnx_file, tmp_path):
    """It has telemetry (1.32), which puts an identifier of the machine into the user's folders."""
    assert not written_by_a_predictor(onnx_file, tmp_path)


def written_by_a_predictor(onnx_file: Path, tmp_path: Path) -> list[str]:
    """Return the paths in the user's folder that a runtime has written."""
    home = tmp_path / "home"
    home.mkdir()
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(tmp_path)}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "ORT_DISABLE_TELEMETRY"  # the conftest sets it
    } | places
    code = "import sys, time; from finetune.inference.predictor import Predictor; Predictor(sys.argv[1]); time.sleep(2)"
    command = [sys.executable, "-c", code, str(onnx_file)]
    subprocess.run(command, env=environment, check=True)
    written = [str(path.relative_to(home)) for path in home.rglob("*")]
    return [path for path in written if re.search("microsoft|onnx", path.lower())]


IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 28, 28), np.uint8))


@pytest.fixture(scope="module")
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier(["a", "b", "c"], backbone="small_cnn", weights=None).double().eval()


def predicted_by(model: Classifier, images: torch.Tensor, *callbacks: pl.Callback) -> torch.Tensor:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", precision="64-true", callbacks=list(callbacks), **quiet)
    batch = {
        "image": images,
        "label": torch.zeros(len(images)).long(),
        "index": torch.arange(len(images)),
        "bad": [],
    }
    (found,) = trainer.predict(model, DataLoader([batch], batch_size=None))
    return found.probabilities


def test_tta_flip_is_the_mean_of_both_views_while_it_predicts(model):
    with torch.no_grad():
        logits = (model(IMAGES) + model(IMAGES.flip(-1))) / 2
    torch.testing.assert_close(
        predicted_by(model, IMAGES, AverageFlip()), logits.softmax(1), rtol=0, atol=1e-12
    )
    with torch.no_grad():
        torch.testing.assert_close(
            predicted_by(model, IMAGES), model(IMAGES).softmax(1), rtol=0, atol=1e-12
        )
    assert "forward" not in vars(model)


@pytest.mark.slow
def test_commands_take_tta_flip(colours, cli, tmp_path: Path):
    cli("fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false")
    scramble(tmp_path / "runs/fit/version_0/checkpoints/best.ckpt")
    found = {}
    for name, option in (("plain", []), ("mean", ["--tta", "flip"])):
        cli("predict", "runs/fit/version_0", colours / "test", "--output", f"{name}.csv", *option)
        found[name] = (tmp_path / f"{name}.csv").read_text()
    assert found["plain"] != found["mean"]
    cli("test", "runs/fit/version_0", "--tta", "flip")
    cli("validate", "runs/fit/version_0", "--tta", "flip")


OF_CLASSES = Calibration("single", (2.7,), (0.0,), num_images=50)
OF_LABELS = Calibration("several", (0.5, 3.0, 1.0), (0.25, -2.0, 0.0), (0.4, 0.5, 0.6))


@pytest.mark.parametrize("calibration", [OF_CLASSES, OF_LABELS])
def test_a_calibrated_head_gives_calibrated_logits(calibration):
    torch.manual_seed(0)
    features = torch.randn(20, 8, dtype=torch.float64)
    weight = torch.randn(3, 8, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)
    plain = calibration.without_scaling()
    expected = calibration.probabilities(linear(features, weight, bias))
    actual = plain.probabilities(linear(features, *calibrated_head(weight, bias, calibration)))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    # control
    assert (plain.probabilities(linear(features, weight, bias)) - expected).abs().max() > 0.1
    if calibration is OF_LABELS:
        assert plain.thresholds == OF_LABELS.thresholds
