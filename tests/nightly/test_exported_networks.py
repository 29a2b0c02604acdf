"""Exports of every kind of network and checkpoint: grey images, double precision, a temperature and a threshold."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from colours import QUICKEST, draw_colours
from data_files import write_unpacked
from networks import few_blocks
from probabilities import probabilities
from safetensors.torch import load_file
from small_fits import scramble
from torch import nn
from torchvision import models

from finetune.data.decode import decode
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.exporters import WRITERS, write_onnx
from finetune.inference.predictor import Predictor
from finetune.models.backbones import build, normalization
from finetune.models.image_classifier import ImageClassifier
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.training.calibration import Calibration

# from images (N, h, w, 3) uint8 to probabilities and logits (N, K)
Run = Callable[[np.ndarray], list[np.ndarray]]
# one with few blocks of each kind; LeNet: below
NETWORKS = [
    ("resnet", 64),
    ("mobilenet", 64),
    ("efficientnet", 64),
    ("convnext", 64),
    ("vit", 32),
]
FULL_NAMES = {
    "resnet": "resnet18",
    "mobilenet": "mobilenet_v3_small",
    "efficientnet": "efficientnet_b0",
    "convnext": "convnext_tiny",
    "vit": "vit_b_16",
}


def module(name: str) -> EndToEnd:
    torch.manual_seed(0)
    network = few_blocks(name) if name in FULL_NAMES else build(name, 3)
    for part in network.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight)
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None
            nn.init.uniform_(part.weight, 0.5, 1.5)
    if any(isinstance(part, nn.BatchNorm2d) for part in network.modules()):
        # statistics as after training: a wrong folding would be seen
        network.train()(torch.randn(16, 3, 64, 64))
    full = FULL_NAMES.get(name, name)
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in normalization(full))
    return EndToEnd(
        ImageClassifier(network, mean, std), Calibration("single", (1 / 1.5,), (0.0,))
    ).eval()


def onnx_run(full: EndToEnd, size: int, folder: Path) -> Run:
    write_onnx(full, size, "about", folder / "some.onnx")
    # and no file of weights next to it
    assert [path.name for path in folder.iterdir()] == ["some.onnx"]
    session = onnxruntime.InferenceSession(folder / "some.onnx", providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == {"finetune": "about"}
    return lambda images: session.run(None, {"images": images})


@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_every_kind_of_network_agrees_with_its_file(tmp_path, name, size):
    full = module(name)
    run = onnx_run(full, size, tmp_path)
    rng = np.random.default_rng(0)
    # Noise of several coarsenesses: of a network with random weights all fine noise looks the same.
    coarse = [(rng.integers(0, 256, (1, k, k, 3), np.uint8), size // k) for k in (1, 2, 4)]
    images = np.concatenate([noise.repeat(side, 1).repeat(side, 2) for noise, side in coarse])
    with torch.no_grad():
        own = [value.numpy() for value in full(torch.from_numpy(images))]
    spread = np.abs(own[1] - own[1][::-1]).max()
    for num in (1, 3):
        probabilities, logits = run(images[:num])
        assert probabilities.dtype == np.float32 and probabilities.shape == (num, 3)
        np.testing.assert_allclose(probabilities, own[0][:num], rtol=0, atol=1e-5)
        # Of EfficientNet's logits here, up to 311, float32 leaves 0.008 (torch) to 0.02 (onnxruntime) next to float64.
        np.testing.assert_allclose(logits, own[1][:num], rtol=0, atol=5e-4 * np.abs(own[1]).max())
    assert spread > 1e-2  # the images differ by far more than what is allowed


def test_safetensors_have_the_names_of_torchvision(tmp_path):
    full = module("resnet18")
    WRITERS["safetensors"][1](full, 64, "about", tmp_path / "some.safetensors")
    network = models.resnet18(num_classes=3).eval()
    network.load_state_dict(load_file(tmp_path / "some.safetensors"))
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(network(x), full.network(x))


BEST = "runs/fit/version_0/checkpoints/best.ckpt"


def assert_all_agree(cli, best: str, images: list[np.ndarray]) -> None:
    """Export a checkpoint in each way, and hold the files against it."""
    scramble(Path(best))
    own = Predictor(best)
    for kind in ("onnx", "safetensors"):
        name = f"some.{kind}"
        cli("export", best, "--output", name, "--format", kind)
        np.testing.assert_allclose(
            probabilities(name, images), probabilities(own, images), rtol=0, atol=2e-6
        )
    assert probabilities(own, images).std(axis=0).max() > 1e-4  # they are distinguished


def test_lenet_on_grey_clothes(cli, tmp_path):
    root = write_unpacked(tmp_path / "clothes")
    few = ["--trainer.max_epochs", 2, "--trainer.accelerator", "cpu", "--data.num_workers", 0]
    few += ["--report", "false", "--data.batch_size", 20]
    cli("fit", "--config", "fashion_mnist_lenet.yaml", "--data.root", root, *few)
    grey = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1), np.uint8).repeat(3, axis=3)
    grey[2:] //= 8
    assert_all_agree(
        cli, BEST, [*grey, np.full((90, 61, 3), 250, np.uint8), np.zeros((3, 200, 3), np.uint8)]
    )
    cli("test", "some.onnx", root, "--data", "finetune.FashionMNIST")
    assert json.loads(Path("runs/test/version_0/test.json").read_text())["test/accuracy"] >= 0


def test_double_precision(colours, cli, tmp_path):
    cli("fit", colours, *QUICKEST, "--trainer.precision", "64-true", "--test_after_fit", "false")
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
    cli("fit", two, *QUICKEST, "--data.val_fraction", 0.4, "--threshold", "recall:0.9:green")
    scramble(Path(BEST))  # or all images would be ties
    calibration = Predictor(BEST).calibration
    (threshold,) = calibration.thresholds
    assert calibration.temperature != 1
    cli("export", BEST, "--output", "some.onnx", "--verify_on", two / "test")
    about = json.loads(Path("some.onnx.json").read_text())
    assert about["temperature"] == calibration.temperature
    assert about["calibration"] == calibration.as_plain()
    assert about["calibration"]["aim"]["positive"] == 1
    assert about["calibration"]["thresholds"] == [threshold]
    for name, path in (("own", BEST), ("file", "some.onnx")):
        cli("predict", path, two / "test", "--output", f"{name}.csv")
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
        says = "green" if green >= threshold else "blue"
        assert says == row["class"] or abs(green - threshold) < 1e-5
