"""A checkpoint as a function predicts what `finetune predict` writes."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_fits import data, fit
from tiers import sweep
from torchvision.models import vision_transformer

from finetune import Classifier
from finetune.api.loaded_model import load
from finetune.data.decode import decode
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.exporters import WRITERS
from finetune.inference.predictor import Predictor, device_named
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import packed
from finetune.training.calibration import Calibration


def test_probabilities_are_those_of_predict(checkpoint, colours, cli, tmp_path):
    cli(
        "predict",
        "--ckpt_path",
        checkpoint,
        "--data.predict",
        colours / "test",
        "--trainer.precision",
        "32-true",
    )
    with open(next(tmp_path.rglob("predictions.csv")), newline="") as file:
        rows = list(csv.DictReader(file))
    predictor = Predictor(checkpoint)
    assert predictor.class_names == ["blue", "green", "red"] and len(rows) == 30
    found = predictor([decode(row["path"]) for row in rows])
    assert found.dtype == np.float64 and found.shape == (30, 3)
    written = [[float(row[f"p_{name}"]) for name in predictor.class_names] for row in rows]
    # predict fuses batch norm into the convolutions, and writes seven digits
    np.testing.assert_allclose(found, written, rtol=0, atol=2e-6)
    # the neighbours of an image do not matter
    one_by_one = [predictor([decode(row["path"])])[0] for row in rows]
    np.testing.assert_allclose(found, one_by_one, rtol=0, atol=1e-6)


def test_images_are_prepared_as_the_checkpoint_says(checkpoint):
    predictor = Predictor(checkpoint)
    image = np.zeros((40, 80, 3), np.uint8)
    image[:, :20] = 255  # `squash` keeps it, `shorter_side` would crop it away
    for side in (None, 120):
        prepared = predictor.prepare(image, side)
        assert prepared.shape == (side or 32, side or 32, 3) and prepared[:, 0].min() > 200


def test_a_vit_for_images_of_another_size_comes_of_its_checkpoint_alone(
    colours, tmp_path, monkeypatch
):
    full = vision_transformer._vision_transformer
    small = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
    monkeypatch.setattr(
        vision_transformer, "_vision_transformer", lambda **given: full(**{**given, **small})
    )
    images = data(colours)
    model = Classifier(images.class_names, "vit_b_16", None, network_size=32)
    fit(model, images).save_checkpoint(tmp_path / "some.ckpt")
    network = Predictor(tmp_path / "some.ckpt").model.network
    assert network.image_size == 32 and network.encoder.pos_embedding.shape == (1, 5, 8)
    assert network.encoder.pos_embedding.equal(model.network.encoder.pos_embedding)


def test_what_training_froze_is_frozen(colours, tmp_path):
    images = data(colours)
    for freeze in (None, "layer2"):
        model = Classifier(images.class_names, "resnet18", None, freeze=freeze)
        fit(model, images, max_steps=1).save_checkpoint(tmp_path / "some.ckpt")
        network = Predictor(tmp_path / "some.ckpt").model.network
        trains = {name: p.requires_grad for name, p in network.named_parameters()}
        assert trains == {name: p.requires_grad for name, p in model.network.named_parameters()}
        assert trains["layer2.0.conv1.weight"] == (freeze is None) and trains["fc.weight"]


def test_the_device_that_there_is():
    assert device_named("cpu") == torch.device("cpu")
    assert device_named("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", sweep(["64-true", "bf16-mixed", "bf16-true"], quick=["bf16-mixed"])
)
def test_it_computes_in_another_precision(checkpoint, precision, colours):
    image = decode(next((colours / "test").rglob("*.png")))
    plain, other = Predictor(checkpoint), Predictor(checkpoint, precision=precision)
    assert other.precision == precision
    difference = np.abs(plain([image]) - other([image])).max()
    assert 0 < difference < (1e-6 if precision == "64-true" else 0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_it_computes_on_a_gpu(checkpoint, precision, colours):
    image = decode(next((colours / "test").rglob("*.png")))
    found = Predictor(checkpoint, "cuda", precision)([image])
    tolerance = 0.05 if precision == "bf16-mixed" else 0.02  # as on a CPU
    np.testing.assert_allclose(found, Predictor(checkpoint)([image]), rtol=0, atol=tolerance)


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


def exported(path: Path, kind: str) -> Path:
    """What `finetune export` would write of a checkpoint if it did not compare both."""
    predictor, target = Predictor(path), path.with_suffix(f".{kind}")
    module = EndToEnd(predictor.model, Calibration()).eval()
    WRITERS[kind][1](module, predictor.image_size, packed(read_checkpoint(path)), target)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", sweep(["ckpt", "onnx", "safetensors"], quick=["ckpt"]))
def test_probabilities_that_are_not_numbers_are_an_error_that_names_file_and_image(
    damaged, kind, colours, cli, tmp_path
):
    reported = f"cannot classify {{}}.*: .*some.{kind} gives probabilities that are not finite"
    file = damaged if kind == "ckpt" else exported(damaged, kind)
    image, first = colours / "test", colours / "test/blue/00.png"
    with pytest.raises(ValueError, match=reported.format(first)):
        load(file).predict(image)
    with pytest.raises(ValueError, match=reported.format(first)):
        load(file).predict(first, abstain_below=0.5, on_bad_image="skip")
    with pytest.raises(ValueError, match=reported.format(r"images\[0\] \(and 1 more\)")):
        load(file).predict([first.read_bytes()] * 2)
    with pytest.raises(ValueError, match=reported.format("image 0")):
        Predictor(file)([decode(str(first))])
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


@pytest.mark.slow
def test_an_export_of_them_is_not_kept(damaged, cli, tmp_path):
    with pytest.raises(ValueError, match="was discarded"):
        cli("export", damaged, "--format", "safetensors", "--output", "b.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_is_finite_is_no_error(small, colours):
    (one,) = load(small).predict(colours / "test/blue/00.png")
    assert json.loads(json.dumps(one.probabilities, allow_nan=False)) == one.probabilities
