"""An exported file is read like its checkpoint, and an untrusted one is not trusted."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file

from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import KEY, packed, read_exported


@pytest.fixture
def checkpoint(fitted_runs) -> dict:
    return read_checkpoint(fitted_runs.single / "checkpoints/best.ckpt")


def write_safetensors(path: Path, about: str | None, state: dict | None = None) -> Path:
    save_file(state or {"conv1.weight": torch.ones(2)}, path, {KEY: about} if about else None)
    return path


def write_onnx(path: Path, about: str | None, is_external: bool = False) -> Path:
    value = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    if is_external:
        value.data_location = TensorProto.EXTERNAL
        value.external_data.add(key="location", value="/etc/passwd")
    node = helper.make_node("Identity", ["w"], ["y"])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    model = helper.make_model(helper.make_graph([node], "g", [], [output], [value]))
    if about:
        helper.set_model_props(model, {KEY: about})
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    "name", ["hot\u3000dog", "\u06cc\u200c\u0631", "\U0001f469\u200d\U0001f373"]
)
def test_class_names_that_train_are_read_back(checkpoint, tmp_path, name):
    names = [name, *checkpoint["hyper_parameters"]["class_names"][1:]]
    checkpoint["hyper_parameters"]["class_names"] = names
    found = read_exported(write_safetensors(tmp_path / "some.safetensors", packed(checkpoint)))
    assert found["hyper_parameters"]["class_names"] == names
    # an untrusted, for a terminal
    checkpoint["hyper_parameters"]["class_names"] = [name + "\x1b", *names[1:]]
    with pytest.raises(ValueError, match="class_names"):
        read_checkpoint(write_safetensors(tmp_path / "some.safetensors", packed(checkpoint)))


def test_weights_of_a_folder_are_known_by_their_name_alone(checkpoint):
    checkpoint["hyper_parameters"]["weights"] = "/home/somebody/secret/resnet18.pt"
    assert json.loads(packed(checkpoint))["model"]["weights"] == "resnet18.pt"
    older = {"began_from": "/home/somebody/other/best.ckpt", "licence_of_the_weights": None}
    checkpoint["finetune"] |= older
    text = packed(checkpoint)
    assert json.loads(text)["licence_of_the_weights"].startswith(
        "the checkpoint best.ckpt: licence unknown"
    )
    assert "somebody" not in text


def in_an_attribute(model) -> None:
    value = model.graph.initializer.pop()
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=value))


def in_an_inner_graph(model) -> None:
    inner = helper.make_graph([], "inner", [], [], [model.graph.initializer.pop()])
    model.graph.node.insert(
        0, helper.make_node("If", ["c"], ["w"], then_branch=inner, else_branch=inner)
    )


@pytest.mark.parametrize("hide", [lambda model: None, in_an_attribute, in_an_inner_graph])
def test_weights_in_another_file_are_refused_wherever_they_hide(tmp_path, hide):
    path = write_onnx(tmp_path / "some.onnx", "{}", is_external=True)
    model = onnx.load(path, load_external_data=False)
    hide(model)
    path.write_bytes(model.SerializeToString())
    assert b"/etc/passwd" in path.read_bytes()
    with pytest.raises(ValueError, match="in other files"):
        read_exported(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("class_weight", [1.0]),
        ("std", [0.0] * 3),
        ("data", None),
        ("model.other", 1),
        ("seen.val", float("inf")),
    ],
)
def test_what_no_export_of_ours_has_written_is_refused(checkpoint, tmp_path, key, value):
    plain = json.loads(packed(checkpoint))
    read_checkpoint(write_onnx(tmp_path / "own.onnx", json.dumps(plain)))
    *groups, name = key.split(".")
    (plain[groups[0]] if groups else plain)[name] = value
    with pytest.raises(ValueError, match="damaged|not a valid checkpoint"):
        read_checkpoint(write_onnx(tmp_path / "some.onnx", json.dumps(plain)))
