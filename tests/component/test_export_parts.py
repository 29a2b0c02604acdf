"""Parts of `finetune export`: the verification, int8, and two files that replace two others."""

import errno
import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from small_fits import write_checkpoints
from torch import nn

from finetune.commands.export_target import put_file_in_place, workplace
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_check import MAX_DIFFERENCE, compare_prepared, load_exported
from finetune.inference.exporters import write_onnx
from finetune.inference.predictor import Predictor
from finetune.inference.quantize import quantize
from finetune.models.ensemble import Ensemble
from finetune.models.image_classifier import ImageClassifier
from finetune.training.calibration import Calibration


@pytest.fixture(scope="module")
def predictor(colours, tmp_path_factory) -> Predictor:
    folder = write_checkpoints(tmp_path_factory.mktemp("a"), colours, "mobilenet_v3_small", 32)
    return Predictor(folder / "calibrated.ckpt")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (60, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)


# What a wrong file would compute from (images, probabilities of all of them).
WRONG = {
    "upside down": lambda classify, images: classify(np.ascontiguousarray(images[:, ::-1])),
    "without the temperature": lambda classify, images: classify(images) ** 0.5,
    "classes in another order": lambda classify, images: np.roll(classify(images), 1, axis=1),
    "a batch that became a constant": lambda classify, images: classify(images[:1]),
    "not a number": lambda classify, images: np.full((len(images), 3), np.nan),
}


@pytest.mark.slow
def test_the_verification_of_an_export_finds_what_is_wrong(predictor, images):
    few = images[:9]
    found = compare_prepared(predictor, predictor.classify, few)
    assert found.is_good and found.num_images == 9 and found.num_other == 0
    assert found.largest < 1e-6  # batches of other sizes add in another order
    assert all(milliseconds > 0 for milliseconds in found.milliseconds)
    for name, wrong in WRONG.items():
        found = compare_prepared(
            predictor, lambda x, wrong=wrong: wrong(predictor.classify, x), few
        )
        assert not found.is_good and found.largest > MAX_DIFFERENCE, name


def distance(floats: Path, ints: Path, images: np.ndarray) -> float:
    """Return the distance of probabilities relative to that between images, in standard deviations."""
    own = load_exported(floats)(images)
    found = load_exported(ints)(images)
    return float((own - found).std() / (own - own.mean(axis=0)).std())


@pytest.mark.slow
def test_int8_is_near_to_float_and_in_seven_bits(predictor, images, tmp_path):
    floats, ints, black = (tmp_path / f"{name}.onnx" for name in ("floats", "ints", "black"))
    write_onnx(EndToEnd(predictor.model, Calibration()).eval(), 32, "about", floats)
    quantize(floats, ints, iter([images[:20], images[20:40]]))
    # a MobileNet with random weights is the hardest case
    assert 0 < distance(floats, ints, images[40:]) < 0.5
    model = onnx.load(ints)
    assert {prop.key: prop.value for prop in model.metadata_props} == {"finetune": "about"}
    tensors = model.graph.initializer
    weights = [numpy_helper.to_array(t) for t in tensors if t.data_type == onnx.TensorProto.INT8]
    assert weights and 60 <= max(np.abs(weight).max() for weight in weights) <= 64
    # probabilities are no coarser than float: in 256 steps the sum misses 1 by 0.004
    np.testing.assert_allclose(load_exported(ints)(images).sum(axis=1), 1, rtol=0, atol=1e-6)
    # the control: ranges that were found on black images cut others off
    quantize(floats, black, iter([np.zeros((4, 32, 32, 3), np.uint8)]))
    assert distance(floats, black, images[40:]) > 0.9
    assert {path.name for path in tmp_path.iterdir()} == {"floats.onnx", "ints.onnx", "black.onnx"}


class Joined(nn.Module):
    """Joins its maps before the head, as DenseNet and GoogLeNet do."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 3) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([conv(x) for conv in self.convs], dim=1).mean(dim=(2, 3)))


@pytest.mark.slow
def test_probabilities_of_an_int8_ensemble_are_averaged_in_float(tmp_path):
    torch.manual_seed(0)
    mean, std = torch.zeros(3, 1, 1), torch.full((3, 1, 1), 255.0)
    model = ImageClassifier(Ensemble([Joined(), Joined()]), mean, std)
    floats, ints = tmp_path / "floats.onnx", tmp_path / "ints.onnx"
    write_onnx(EndToEnd(model, Calibration(0.5)).eval(), 8, "about", floats)
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    quantize(floats, ints, iter([images]))
    nodes = onnx.load(ints).graph.node
    makers = {name: node for node in nodes for name in node.output}
    waiting = ["logits", "probabilities"]
    behind_heads: set[str] = set()
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


def contents(target: Path) -> tuple[str, str | None]:
    """Return the text of a file, and of which file the .json next to it tells."""
    about_file = target.with_name(f"{target.name}.json")
    about = json.loads(about_file.read_text())["of"] if about_file.exists() else None
    return target.read_text(), about


def put(folder: Path, text: str) -> None:
    """Put best.onnx with this text and its .json in place."""
    source = folder / f"source{text}"
    source.write_text(text)
    put_file_in_place(source, {"of": text}, folder / "best.onnx", folder / "best.onnx.json")


def test_exports_at_the_same_time_leave_the_file_and_the_json_of_one(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: put(tmp_path, str(i)), range(40)))
    file, about = contents(tmp_path / "best.onnx")
    assert file == about and len(list(tmp_path.iterdir())) == 42


def test_an_export_keeps_links_and_modes_of_both_files(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    for name in ("best.onnx", "best.onnx.json"):
        (disk / name).touch(0o600)
        (tmp_path / name).symlink_to(disk / name)
    put(tmp_path, "new")
    assert contents(tmp_path / "best.onnx") == ("new", "new")
    for name in ("best.onnx", "best.onnx.json"):
        assert (tmp_path / name).is_symlink()
        assert stat.S_IMODE((disk / name).stat().st_mode) == 0o600


def test_an_export_on_a_full_disk_names_the_place_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "the source")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match=r"No space left.*best\.onnx"):
        put(tmp_path, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["sourcenew"]
    with pytest.raises(OSError, match="TMPDIR"), workplace():
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("ends_at", "left"), [("best.onnx", "old"), ("best.onnx.json", "new")])
def test_an_export_that_ends_before_a_file_leaves_no_json_of_another(
    tmp_path, monkeypatch, ends_at, left
):
    put(tmp_path, "old")
    (tmp_path / ".best.onnx.0000f00d.tmp").write_text("of a process that was killed")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if Path(target).name == ends_at:
            raise OSError("the end")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="the end"):
        put(tmp_path, "new")
    assert contents(tmp_path / "best.onnx") == (left, None)
    assert not list(tmp_path.glob(".*"))
