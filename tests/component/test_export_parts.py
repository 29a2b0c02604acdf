"""Parts of `finetune export`: int8, and two files that replace two others."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_fits import write_checkpoints

from finetune.commands.export import put_in_place
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_check import load_exported
from finetune.inference.exporters import write_onnx
from finetune.inference.predictor import Predictor
from finetune.inference.quantize import quantize
from finetune.training.calibration import Calibration


@pytest.fixture(scope="module")
def predictor(colours, tmp_path_factory) -> Predictor:
    folder = write_checkpoints(tmp_path_factory.mktemp("a"), colours, "mobilenet_v3_small", 32)
    return Predictor(folder / "calibrated.ckpt")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (60, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)


def distance(floats: Path, ints: Path, images: np.ndarray) -> float:
    """Return the distance of probabilities relative to that between images, in standard deviations."""
    own = load_exported(floats)(images)
    found = load_exported(ints)(images)
    return float((own - found).std() / (own - own.mean(axis=0)).std())


@pytest.mark.slow
def test_int8_is_near_to_float_and_in_seven_bits(predictor, images, tmp_path):
    floats, ints, black = (tmp_path / f"{name}.onnx" for name in ("floats", "ints", "black"))
    write_onnx(
        EndToEnd(predictor.model, Calibration.unfitted("single", 3)).eval(), 32, "about", floats
    )
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


def contents(target: Path) -> tuple[str, str | None]:
    """Return the text of a file, and of which file the .json next to it tells."""
    about_file = target.with_name(f"{target.name}.json")
    about = json.loads(about_file.read_text())["of"] if about_file.exists() else None
    return target.read_text(), about


def put(folder: Path, text: str) -> None:
    """Put best.onnx with this text and its .json in place."""
    source = folder / f"source{text}"
    source.write_text(text)
    about = folder / f"about{text}"
    about.write_text(json.dumps({"of": text}))
    target = folder / "best.onnx"
    put_in_place(target, {target: source, folder / "best.onnx.json": about})


def test_exports_at_the_same_time_leave_the_file_and_the_json_of_one(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: put(tmp_path, str(i)), range(40)))
    file, about = contents(tmp_path / "best.onnx")
    assert file == about and len(list(tmp_path.iterdir())) == 82


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
