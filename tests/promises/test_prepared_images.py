"""Every program prepares images alike: the complete image (`--data.resize pad`), at the size of evaluation
(`--data.eval_image_size`).
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import NAMES, QUICK
from PIL import Image
from promise import promise
from small_fits import data, fit, scramble
from starlette.testclient import TestClient

from finetune import Classifier
from finetune.cli import run as run_command
from finetune.data.decode import decode
from finetune.data.transforms import eval_transform
from finetune.inference.predictor import Predictor
from finetune.runs import run_lock
from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits

LIMITS = Limits(max_bytes=200_000, max_images=4, max_pixels=100_000, max_waiting=8, seconds=20)
SIZES = ("--data.eval_image_size", "48", "--epochs", "3")


@pytest.fixture(scope="module")
def checkpoint(colours, tmp_path_factory):
    images = data(colours, resize="pad", image_size=28)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("padded") / "some.ckpt"
    fit(Classifier(images.class_names, "small_cnn", weights=None), images).save_checkpoint(path)
    scramble(path)
    return path


@pytest.fixture
def wide(tmp_path):
    """An image of 3:1 whose ends differ from its middle."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 120, 3), np.uint8)
    pixels[:, 40:80] = 30
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    return tmp_path / "wide.png"


@promise("pad")
@pytest.mark.slow
def test_export_checkpoint_and_service_answer_alike_on_a_wide_image(
    checkpoint, wide, cli, tmp_path
):
    cli("export", checkpoint, "--output", "some.onnx")
    answers = {}
    for name, path in {"own": checkpoint, "file": "some.onnx"}.items():
        words = ("--workers", 0, "--trainer.accelerator", "cpu", "--out", f"{name}.csv")
        cli("predict", path, wide, *words)
        (row,) = csv.DictReader(Path(f"{name}.csv").read_text().splitlines())
        answers[name] = [float(row[f"p_{label}"]) for label in NAMES]
    predictor = Predictor(checkpoint)
    app = make_app(Service(predictor, LIMITS, max_batch=4), None, "127.0.0.1")
    with TestClient(app, "http://127.0.0.1") as client:
        reply = client.post("/predict", content=wide.read_bytes())
        (one,) = reply.json()["predictions"]
    answers["service"] = [one["probabilities"][label] for label in NAMES]
    for name, found in answers.items():
        np.testing.assert_allclose(found, answers["own"], rtol=0, atol=1e-5, err_msg=name)
    # independently: the complete image in the middle of the padding
    paper = Image.new("RGB", (28, 28), (124, 116, 104))
    paper.paste(Image.open(wide).resize((28, 9), Image.Resampling.BILINEAR), (0, 9))
    by_hand = predictor.classify(np.array(paper)[None])[0]
    np.testing.assert_allclose(by_hand, answers["own"], rtol=0, atol=0.02)  # 2 grey levels
    # the controls: without padding, and without the ends of the image
    for control in (Image.open(wide).resize((28, 28)), paper.crop((9, 9, 18, 18)).resize((28, 28))):
        other = predictor.classify(np.array(control)[None])[0]
        assert np.abs(other - answers["own"]).max() > 0.05


@pytest.fixture(scope="module")
def sized(colours, tmp_path_factory):
    """The folder of a finished run whose images are larger in evaluation."""
    out = tmp_path_factory.mktemp("sizes")
    run_command(["fit", str(colours), *QUICK, *SIZES, "--out", str(out)])
    run_lock.release()
    return out / "fit/version_0"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_file_alone_tests_images_at_the_size_of_evaluation(sized, colours, cli, tmp_path, kind):
    file = sized / "checkpoints/best.ckpt"
    if kind == "safetensors":
        file = tmp_path / "some.safetensors"
        cli("export", sized, "--format", kind, "--out", file)
        about = json.loads(next(tmp_path.glob("*.json")).read_text())
        assert about["input"]["images"][:4] == ["N", 3, 48, 48]
        assert "resize until the shorter side has 55" in str(about)
    predictor, image = Predictor(file), decode(next((colours / "test").rglob("*.png")))
    assert predictor.image_size == 48
    np.testing.assert_array_equal(
        predictor.prepare(image), eval_transform(48)(image=image)["image"]
    )
    cli("test", file, colours, "--data.num_workers", "0", "--precision", "32-true")
    first, again = (
        json.loads(path.read_text())
        for path in (sized / "test.json", next(tmp_path.rglob("test.json")))
    )
    tolerance = 1e-6 if kind == "ckpt" else 1e-5  # another program
    assert again["test/loss"] == pytest.approx(first["test/loss"], abs=tolerance)


@pytest.mark.slow
def test_evaluation_at_another_size_leaves_training_as_it_is(colours):
    def weights(**options) -> torch.Tensor:
        torch.manual_seed(0)
        images = data(colours, val_fraction=0.25, **options)
        model = Classifier(images.class_names, backbone="timm/test_efficientnet", weights=None)
        fit(model, images, max_epochs=2)
        return torch.cat([value.flatten() for value in model.network.parameters()])

    plain = weights()
    assert torch.equal(plain, weights(eval_image_size=48))
    assert not torch.equal(plain, weights(image_size=24))  # which trains on others
