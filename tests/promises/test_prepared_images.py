"""Every program prepares images alike: the complete image (`--data.resize pad`)."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import NAMES
from PIL import Image
from promise import promise
from small_fits import data, fit, scramble
from starlette.testclient import TestClient

from finetune import Classifier
from finetune.inference.predictor import Predictor
from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits

LIMITS = Limits(max_bytes=200_000, max_images=4, max_pixels=100_000, max_waiting=8, seconds=20)


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
