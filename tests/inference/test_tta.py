"""With test-time augmentation, an image and its mirror image have equal predictions; without it they differ."""

from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from colours import QUICKEST
from small_fits import scramble
from torch.utils.data import DataLoader

from finetune import Classifier
from finetune.inference.tta import AverageFlip

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
    return found["probabilities"]


def test_the_mean_of_both_views_is_reported_and_only_while_it_predicts(model):
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


def test_a_mirrored_image_is_predicted_the_same_and_without_it_is_not(model):
    both = [predicted_by(model, images, AverageFlip()) for images in (IMAGES, IMAGES.flip(-1))]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    plain = [predicted_by(model, images) for images in (IMAGES, IMAGES.flip(-1))]
    assert (plain[0] - plain[1]).abs().max() > 1e-6


@pytest.mark.slow
def test_the_commands_take_it(colours, cli, tmp_path: Path):
    cli("fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false")
    scramble(tmp_path / "runs/fit/version_0/checkpoints/best.ckpt")
    found = {}
    for name, option in (("plain", []), ("mean", ["--tta", "flip"])):
        cli("predict", "runs/fit/version_0", colours / "test", "--output", f"{name}.csv", *option)
        found[name] = (tmp_path / f"{name}.csv").read_text()
    assert found["plain"] != found["mean"]
    cli("test", "runs/fit/version_0", "--tta", "flip")
    cli("validate", "runs/fit/version_0", "--tta", "flip")
