"""int8 predicts nearly as float32 does, in seven bits."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_check import load_exported
from finetune.inference.exporters import write_onnx
from finetune.inference.predictor import Predictor
from finetune.inference.quantize import quantize
from finetune.models.ensemble import Ensemble
from finetune.models.image_classifier import ImageClassifier
from finetune.training.calibration import Calibration

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("floats") / "floats.onnx"
    model = Predictor(trained / "calibrated.ckpt").model
    write_onnx(EndToEnd(model, Calibration()).eval(), 32, "about", path)
    return path


@pytest.fixture
def floats(exported, tmp_path) -> Path:
    return Path(shutil.copy(exported, tmp_path / "floats.onnx"))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (60, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)


@pytest.fixture(scope="module")
def ints(exported, images, tmp_path_factory) -> Path:
    """The file in int8, in a folder of its own with that in float."""
    folder = tmp_path_factory.mktemp("ints")
    floats = Path(shutil.copy(exported, folder / "floats.onnx"))
    quantize(floats, folder / "ints.onnx", iter([images[:20], images[20:40]]))
    return folder / "ints.onnx"


def distance(floats, ints, images) -> float:
    """Distance of probabilities relative to the distance between images, in standard deviations."""
    own, found = (load_exported(path)(images) for path in (floats, ints))
    return float((own - found).std() / (own - own.mean(axis=0)).std())


def test_int8_is_near_to_float(floats, ints, images, tmp_path):
    # a MobileNet, with random weights: hardest of all
    assert 0 < distance(floats, ints, images[40:]) < 0.5
    model = onnx.load(ints)
    assert {prop.key: prop.value for prop in model.metadata_props} == {"finetune": "about"}
    weights = [
        numpy_helper.to_array(t)
        for t in model.graph.initializer
        if t.data_type == onnx.TensorProto.INT8
    ]
    # 7 bits with their sign
    assert weights and 60 <= max(np.abs(weight).max() for weight in weights) <= 64
    assert sorted(path.name for path in ints.parent.glob("*.onnx*")) == ["floats.onnx", "ints.onnx"]
    # The control: ranges that were found on black images cut others off.
    quantize(floats, tmp_path / "black.onnx", iter([np.zeros((4, 32, 32, 3), np.uint8)]))
    assert distance(floats, tmp_path / "black.onnx", images[40:]) > 0.9


def test_what_it_says_is_no_coarser_than_float(ints, images):
    found = load_exported(ints)(images)
    # in 256 steps it misses by 0.004
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=0, atol=1e-6)
    (last,) = [node for node in onnx.load(ints).graph.node if "logits" in node.output]
    assert last.op_type == "Gemm"


class Joined(nn.Module):
    """Joins its maps before the head, as DenseNet and GoogLeNet do."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 3) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([conv(x) for conv in self.convs], dim=1).mean(dim=(2, 3)))


def test_what_members_say_is_joined_in_float(tmp_path):
    torch.manual_seed(0)
    network = Ensemble([Joined(), Joined()])
    module = EndToEnd(
        ImageClassifier(network, torch.zeros(3, 1, 1), torch.full((3, 1, 1), 255.0)),
        Calibration(0.5),
    ).eval()
    write_onnx(module, 8, "about", tmp_path / "floats.onnx")
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    quantize(tmp_path / "floats.onnx", tmp_path / "ints.onnx", iter([images]))
    nodes = onnx.load(tmp_path / "ints.onnx").graph.node
    makers = {name: node for node in nodes for name in node.output}
    waiting, behind_heads = ["logits", "probabilities"], set[str]()
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node.op_type != "Gemm":
            behind_heads.add(node.op_type)
            waiting += node.input
    assert {"Concat", "Softmax"} <= behind_heads
    assert not {"QuantizeLinear", "DequantizeLinear"} & behind_heads
    rounded = {name for node in nodes if node.op_type == "QuantizeLinear" for name in node.input}
    joined = [not rounded.isdisjoint(node.output) for node in nodes if node.op_type == "Concat"]
    assert sorted(joined) == [False, True, True]  # inside the networks it is in int8
