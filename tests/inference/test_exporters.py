"""Exported files compute what the network computes, contain nothing of this machine, and are one file."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import onnxruntime
import pytest
import torch
from networks import few_blocks
from safetensors.torch import load_file
from torch import nn
from torchvision import models

from finetune.commands.export import export
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.exporters import WRITERS, write_onnx
from finetune.models.backbones import build, normalization
from finetune.models.image_classifier import ImageClassifier
from finetune.training.calibration import Calibration

# from images (N, h, w, 3) uint8 to probabilities and logits (N, K)
Run = Callable[[np.ndarray], list[np.ndarray]]
MORE = [
    # of each, one with few blocks
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
NETWORKS = [("lenet", 28), *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)]


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
    return EndToEnd(ImageClassifier(network, mean, std), Calibration(1.5)).eval()


def onnx_run(full: EndToEnd, size: int, folder: Path) -> Run:
    write_onnx(full, size, "about", folder / "some.onnx")
    # and no file of weights next to it
    assert [path.name for path in folder.iterdir()] == ["some.onnx"]
    session = onnxruntime.InferenceSession(folder / "some.onnx", providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == {"finetune": "about"}
    return lambda images: session.run(None, {"images": images})


@pytest.mark.slow
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


def test_the_command_has_every_format():
    """Those of one file, and the folder of timm."""
    formats = get_args(inspect.signature(export).parameters["format"].annotation)
    assert formats == (*WRITERS, "timm")


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_nothing_of_this_machine_is_in_a_file(tmp_path, kind):
    suffix, write = WRITERS[kind]
    path = tmp_path / f"some{suffix}"
    write(module("lenet"), 28, "about", path)
    content = path.read_bytes()
    for place in (
        Path(__file__).parents[2],
        tmp_path,
        Path.home(),
        Path(os.__file__).parent,
        Path(torch.__path__[0]),
    ):
        assert str(place).encode() not in content
    assert b".py" not in content
    assert b"about" in content


@pytest.mark.slow
def test_safetensors_have_the_names_of_torchvision(tmp_path):
    full = module("resnet18")
    WRITERS["safetensors"][1](full, 64, "about", tmp_path / "some.safetensors")
    network = models.resnet18(num_classes=3).eval()
    network.load_state_dict(load_file(tmp_path / "some.safetensors"))
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(network(x), full.network(x))
