"""Weight files of every kind, and files that are none."""

import argparse
import collections
import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import CATEGORIES, SMALL, network, random_state
from safetensors.torch import save_file
from torch import nn

from finetune.models.backbones import build
from finetune.models.weight_files import read_file

KINDS = {
    "plain.pt": lambda state: state,
    "nested.pth": lambda state: {"state_dict": state, "epoch": 3},
    "nested_model.pth": lambda state: {"model": state, "args": {"lr": 0.1}},
    "data_parallel.pt": lambda state: {f"module.{key}": value for key, value in state.items()},
    "training_loop.pt": lambda state: {
        "epoch": 3,
        "model_state_dict": state,
        "loss": np.float64(0.1),
    },
    "compiled.pt": lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
    "both.pt": lambda state: {
        "model": {f"_orig_mod.module.{key}": value for key, value in state.items()}
    },
    "lightning.pt": lambda state: {
        "state_dict": {f"model.{key}": value for key, value in state.items()}
    },
    "ours.ckpt": lambda state: {
        "state_dict": {f"network.{key}": value for key, value in state.items()}
        | {"mean": torch.zeros(3, 1, 1)},
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
    torch.save(
        {"fc.weight": torch.ones(2, 2).half(), "fc.bias": torch.ones(2).bfloat16()},
        tmp_path / "half.pt",
    )
    state = read_file(tmp_path / "half.pt").state
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.slow
def test_names_of_older_files_are_brought_up_to_date(tmp_path):
    dense, layer = "features.denseblock1.denselayer2", "encoder.layers.encoder_layer_0.mlp"
    old = [
        f"{dense}.norm.1.running_mean",
        f"{dense}.conv.2.weight",
        f"{layer}.linear_1.bias",
        f"{layer}.linear_2.bias",
    ]
    new = [
        f"{dense}.norm1.running_mean",
        f"{dense}.conv2.weight",
        f"{layer}.0.bias",
        f"{layer}.3.bias",
    ]
    torch.save({key: torch.zeros(1) for key in old}, tmp_path / "old.pth")
    assert list(read_file(tmp_path / "old.pth").state) == new
    with torch.device("meta"):
        assert set(new[:2]) <= build("densenet121", 2).state_dict().keys()
        assert set(new[2:]) <= build("vit_b_16", 2).state_dict().keys()


def trained(num_classes: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and an optimizer with state, as a trainer has them when it saves."""
    net = build(SMALL, num_classes)
    net.load_state_dict(random_state(SMALL, num_classes))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.rand(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    return net, optimizer


def of_torchvision_references(
    net: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> dict[str, torch.Tensor]:
    """What references/classification/train.py of torchvision saves."""
    args = argparse.Namespace(model=SMALL, lr=0.1, output_dir="out", mixup_alpha=None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    states = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
    }
    torch.save({**states, "epoch": 3, "args": args}, path)
    return net.state_dict()


def of_timm(
    net: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> dict[str, torch.Tensor]:
    """What timm's train.py saves, by its own saver."""
    from timm.utils import CheckpointSaver

    args = argparse.Namespace(model=SMALL, lr=0.1, mean=None, img_size=(3, 32, 32))
    saver = CheckpointSaver(net, optimizer, args=args, checkpoint_dir=str(path.parent))
    saver.save_checkpoint(3, metric=np.float64(76.5))
    (path.parent / "last.pth.tar").rename(path)
    return net.state_dict()


@pytest.mark.parametrize(
    "trainer", [of_torchvision_references, pytest.param(of_timm, marks=pytest.mark.slow)]
)
def test_checkpoints_of_other_trainers_are_read(trainer, tmp_path):
    net, optimizer = trained()
    expected = trainer(net, optimizer, tmp_path / "theirs.pth.tar")
    # the control: torch alone refuses the command's arguments
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "theirs.pth.tar", weights_only=True)
    read = read_file(tmp_path / "theirs.pth.tar")
    assert read.state.keys() == expected.keys()
    assert all(read.state[key].equal(value) for key, value in expected.items())


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_checkpoint_of_another_lightning_module(is_zip, tmp_path):
    state = random_state(SMALL, 7)
    content = {
        "pytorch-lightning_version": "2.1.0",
        "epoch": 4,
        "callbacks": {
            "ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": np.float32(0.5)}
        },
        "state_dict": {f"model.{key}": value for key, value in state.items()}
        | {"criterion.weight": torch.ones(7)},
        "hyper_parameters": {"class_names": 3},
    }
    torch.save(content, tmp_path / "theirs.ckpt", _use_new_zipfile_serialization=is_zip)
    read = read_file(tmp_path / "theirs.ckpt")
    assert read.state.keys() == state.keys() and all(
        read.state[key].equal(state[key]) for key in state
    )
    assert (read.class_names, read.mean) == (None, None)


def test_other_readers_stay_as_strict_as_before(tmp_path):
    torch.save(
        {"state_dict": {"a": torch.ones(2)}, "args": argparse.Namespace()}, tmp_path / "a.pt"
    )
    before = set(torch.serialization.get_safe_globals())
    read_file(tmp_path / "a.pt")
    assert set(torch.serialization.get_safe_globals()) == before


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


class Canary:
    """Unpickled by Python, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Scalar(Canary):
    """A harmless function with a harmful argument."""

    def __reduce__(self):
        return np.float64(1).__reduce__()[0], (Canary(Path(self.path)), b"")


HIDDEN = {
    "in the arguments": lambda state, code: {"model": state, "args": argparse.Namespace(lr=[code])},
    "in a score": lambda state, code: {"state_dict": state, "metric": Scalar(Path(code.path))},
    "as a key": lambda state, code: {"state_dict": state, (code,): 1},
    "among the weights": lambda state, code: {"state_dict": {**state, "fc.weight": code}},
    "in the hyperparameters": lambda state, code: {
        "state_dict": state,
        "hyper_parameters": {"a": code},
    },
    "behind an ordered dict": lambda state, code: collections.OrderedDict(
        state, extra={"a": (code,)}
    ),
}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("place", HIDDEN)
def test_code_in_an_otherwise_good_file_does_not_run(place, is_zip, tmp_path):
    path, canary = tmp_path / "theirs.pth", tmp_path / "ran"
    torch.save(
        HIDDEN[place]({"a": torch.ones(2)}, Canary(canary)),
        path,
        _use_new_zipfile_serialization=is_zip,
    )
    with pytest.raises(
        ValueError,
        match=r"theirs.pth holds posix.mkdir, which is neither .*; refusing to unpickle it",
    ):
        read_file(path)
    assert not canary.exists()
    with suppress(TypeError):  # NumPy's, which comes after the folder was made
        torch.load(path, weights_only=False)  # the control: it would have run
    assert canary.is_dir()


def test_a_complete_network_is_refused_with_what_to_do(tmp_path):
    torch.save(network(SMALL), tmp_path / "whole.pt")
    with pytest.raises(
        ValueError,
        match=r"holds torchvision.models.mobilenetv3.MobileNetV3, .*torch.save\(model.state_dict",
    ):
        read_file(tmp_path / "whole.pt")


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors", "a.pth.tar"])
def test_a_git_lfs_pointer_is_named(name, tmp_path):
    pointer = (
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 46830571\n"
    )
    (tmp_path / name).write_text(pointer)
    with pytest.raises(
        ValueError, match=f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`"
    ):
        read_file(tmp_path / name)


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
        "evil.pt": "holds print, which is neither a tensor nor a plain value; refusing to unpickle it",
        "old_evil.pt": "holds print, which is neither a tensor nor a plain value; refusing to unpickle it",
        "list.pt": "is not a state dict: it contains other objects than named tensors",
        "dict.pt": "is not a state dict: it contains other objects than named tensors",
        "text.pt": "is damaged, or not a file of torch",
        "page.pt": "is damaged, or not a file of torch",
        "empty.pt": "is damaged, or not a file of torch",
        "cut.pt": "is damaged, or not a file of torch",
        "text.safetensors": "is not readable as safetensors: ",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError) as caught:
            read_file(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name} {message}")
        assert "\n" not in str(caught.value)
    assert "unpickled" not in capsys.readouterr().out


def test_numbers_for_names_are_refused(tmp_path):
    torch.save({"state_dict": {1: torch.ones(2), 2: torch.ones(2)}}, tmp_path / "numbers.pt")
    with pytest.raises(ValueError, match="it contains other objects than named tensors"):
        read_file(tmp_path / "numbers.pt")
