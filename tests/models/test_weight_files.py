"""Weights files of every kind, and those that are none."""

import pickle

import pytest
import torch
from networks import CATEGORIES, SMALL, random_state
from safetensors.torch import save_file

from finetune.models.backbones import build
from finetune.models.weight_files import read_file

KINDS = {
    "plain.pt": lambda state: state,
    "nested.pth": lambda state: {"state_dict": state, "epoch": 3},
    "nested_model.pth": lambda state: {"model": state, "args": {"lr": 0.1}},
    "data_parallel.pt": lambda state: {f"module.{key}": value for key, value in state.items()},
    "compiled.pt": lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
    "both.pt": lambda state: {"model": {f"_orig_mod.module.{key}": value for key, value in state.items()}},
    "lightning.pt": lambda state: {"state_dict": {f"model.{key}": value for key, value in state.items()}},
    "ours.ckpt": lambda state: {
        "state_dict": {f"network.{key}": value for key, value in state.items()} | {"mean": torch.zeros(3, 1, 1)},
        "hyper_parameters": {"class_names": CATEGORIES},
    },
}


@pytest.mark.parametrize("kind", [*KINDS, "weights.safetensors"])
def test_every_kind_of_file_gives_the_same_weights(kind, tmp_path):
    state = random_state(SMALL, 7)
    path = tmp_path / kind
    if kind in KINDS:
        torch.save(KINDS[kind](state), path)
    else:
        save_file(state, path)
    read = read_file(path)
    assert list(sorted(read.state)) == sorted(state)
    assert all(read.state[key].equal(state[key]) for key in state)
    assert read.class_names == (CATEGORIES if kind == "ours.ckpt" else None)
    assert read.origin == str(path)


def test_half_precision_is_cast(tmp_path):
    torch.save({"fc.weight": torch.ones(2, 2).half(), "fc.bias": torch.ones(2).bfloat16()}, tmp_path / "half.pt")
    state = read_file(tmp_path / "half.pt").state
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.slow
def test_names_of_older_files_are_brought_up_to_date(tmp_path):
    dense, layer = "features.denseblock1.denselayer2", "encoder.layers.encoder_layer_0.mlp"
    old = [f"{dense}.norm.1.running_mean", f"{dense}.conv.2.weight", f"{layer}.linear_1.bias", f"{layer}.linear_2.bias"]
    new = [f"{dense}.norm1.running_mean", f"{dense}.conv2.weight", f"{layer}.0.bias", f"{layer}.3.bias"]
    torch.save({key: torch.zeros(1) for key in old}, tmp_path / "old.pth")
    assert list(read_file(tmp_path / "old.pth").state) == new
    with torch.device("meta"):
        assert set(new[:2]) <= build("densenet121", 2).state_dict().keys()
        assert set(new[2:]) <= build("vit_b_16", 2).state_dict().keys()


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_files_that_are_no_weights(tmp_path, capsys):
    torch.save({"state_dict": {}, "object": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "old_evil.pt").write_bytes(pickle.dumps(Evil(), protocol=2))
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "dict.pt")
    (tmp_path / "text.pt").write_text("hello, I am a text")
    (tmp_path / "page.pt").write_text("<!DOCTYPE html><html>an error page</html>")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"a": torch.zeros(1000)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:2000])
    (tmp_path / "text.safetensors").write_text("hello, I am a text")
    messages = {
        "evil.pt": "is not a plain state dict (it contains Python objects); refusing to unpickle",
        "old_evil.pt": "is not a plain state dict (it contains Python objects); refusing to unpickle",
        "list.pt": "is not a state dict: it holds something else than named tensors",
        "dict.pt": "is not a state dict: it holds something else than named tensors",
        "text.pt": "is broken, or no file of torch",
        "page.pt": "is broken, or no file of torch",
        "empty.pt": "is broken, or no file of torch",
        "cut.pt": "is broken, or no file of torch",
        "text.safetensors": "can't be read as safetensors: ",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError) as caught:
            read_file(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name} {message}")
        assert "\n" not in str(caught.value)
    assert "unpickled" not in capsys.readouterr().out
