"""The preparation inside an exported file is that of evaluation, to the last bit of each pixel."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional as F

from finetune.data.transforms import eval_transform
from finetune.inference.any_size import prepend
from finetune.inference.exporters import OPSET

pytestmark = pytest.mark.slow
MODES = ("whole", "squash", "shorter_side", "pad")
# Height and width: as large as the network's or what it is resized to, smaller, larger, both; tiny, wide, tall; lines.
SIZES = [
    (64, 64),
    (73, 73),
    (72, 74),
    (1, 1),
    (2, 3),
    (20, 30),
    (30, 200),
    (200, 30),
    (300, 400),
    (480, 361),
]
SIZES += [(900, 2), (3, 1000), (1, 4000), (40_000, 1), (73, 900), (1500, 2000)]


def session_of(path, resize, image_size=64):
    """A network that does nothing, with its preparation before it."""
    shape = ["batch", image_size, image_size, 3]
    values = [
        helper.make_tensor_value_info(name, TensorProto.UINT8, shape) for name in ("images", "same")
    ]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["images"], ["same"])], "g", values[:1], values[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    helper.set_model_props(model, {"finetune": "about"})
    onnx.save(model, path / "source.onnx")
    prepend(path / "source.onnx", path / "some.onnx", image_size, resize)
    return onnxruntime.InferenceSession(path / "some.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("resize", MODES)
def test_images_of_any_size_are_prepared_as_for_evaluation(tmp_path, resize):
    session = session_of(tmp_path, resize)
    own = eval_transform(64, resize)
    rng = np.random.default_rng(0)
    for height, width in SIZES + [tuple(rng.integers(1, 400, 2).tolist()) for _ in range(40)]:
        # noise: any other weight or rounding shows
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        (found,) = session.run(None, {"images": image[None]})
        np.testing.assert_array_equal(
            found[0], own(image=image)["image"], err_msg=f"{height} x {width}"
        )


def test_the_control_is_a_resize_without_its_rounding():
    image, own = (
        np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8),
        eval_transform(64, "whole"),
    )
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2).float()
    exact = (
        F.interpolate(pixels, (64, 64), mode="bilinear", antialias=True)
        .round()[0]
        .permute(1, 2, 0)
        .numpy()
    )
    differs = np.abs(exact - own(image=image)["image"])
    assert differs.max() == 1 and (differs > 0).mean() > 0.05


def test_several_of_a_size_go_together(tmp_path):
    session, own = session_of(tmp_path, "shorter_side"), eval_transform(64)
    images = np.random.default_rng(0).integers(0, 256, (3, 100, 90, 3), np.uint8)
    (found,) = session.run(None, {"images": images})
    np.testing.assert_array_equal(found, np.stack([own(image=image)["image"] for image in images]))


def test_a_file_keeps_what_it_says_of_itself_and_its_names(tmp_path):
    session = session_of(tmp_path, "whole")
    assert session.get_modelmeta().custom_metadata_map == {"finetune": "about"}
    assert [value.name for value in session.get_inputs()] == ["images"]
    assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
    assert [value.name for value in session.get_outputs()] == ["same"]
    assert b".py" not in (tmp_path / "some.onnx").read_bytes()  # nothing of this machine
