"""Files of weights and checkpoints, of every trainer, and what is no such file: nothing in one is run."""

import argparse
import collections
import copy
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from networks import CATEGORIES, SMALL
from PIL import Image
from promise import control, promise
from safetensors.torch import save_file
from torch import nn

from finetune.inference.predictor import Predictor
from finetune.models.backbones import build
from finetune.models.weight_files import load_safely, read_file
from finetune.models.weights import read_weights
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint

STATE = {
    "conv.weight": torch.rand(8, 3, 3, 3, generator=torch.Generator().manual_seed(0)),
    "fc.weight": torch.rand(7, 8, generator=torch.Generator().manual_seed(1)),
    "fc.bias": torch.arange(7.0),
}


def renamed(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": value for key, value in STATE.items()}


SCORE = {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": np.float32(0.5)}}
KINDS = {
    "plain.pt": STATE,
    "nested.pth": {"state_dict": STATE, "epoch": 3},
    "data_parallel.pt": renamed("module."),
    "training_loop.pt": {"epoch": 3, "model_state_dict": STATE, "loss": np.float64(0.1)},
    "both.pt": {"model": renamed("_orig_mod.module.")},
    "lightning.pt": {"state_dict": renamed("model.")},
    "of_another_lightning_module.ckpt": {
        "pytorch-lightning_version": "2.1.0",
        "callbacks": SCORE,
        "state_dict": renamed("model.") | {"criterion.weight": torch.ones(7)},
        "hyper_parameters": {"class_names": 3},
    },
    "ours.pt": renamed("network.") | {"mean": torch.zeros(3, 1, 1)},
}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "weights.safetensors"])
def test_every_kind_of_file_gives_the_same_weights(kind, is_zip, tmp_path):
    path = tmp_path / kind
    if kind in KINDS:
        torch.save(KINDS[kind], path, _use_new_zipfile_serialization=is_zip)
    else:
        save_file(STATE, path)
    read = read_file(path)
    assert read.state.keys() == STATE.keys()
    assert all(read.state[key].equal(value) for key, value in STATE.items())
    assert read.origin == str(path)


def test_weights_in_half_precision_and_with_older_names_are_brought_up_to_date(tmp_path):
    dense, layer = "features.denseblock1.denselayer2", "encoder.layers.encoder_layer_0.mlp"
    names = {
        f"{dense}.norm.1.running_mean": f"{dense}.norm1.running_mean",
        f"{dense}.conv.2.weight": f"{dense}.conv2.weight",
        f"{layer}.linear_1.bias": f"{layer}.0.bias",
        f"{layer}.linear_2.bias": f"{layer}.3.bias",
    }
    torch.save({key: torch.zeros(1).half() for key in names}, tmp_path / "old.pth")
    state = read_file(tmp_path / "old.pth").state
    assert list(state) == list(names.values())
    assert {value.dtype for value in state.values()} == {torch.float32}
    with torch.device("meta"):
        known = build("densenet121", 2).state_dict() | build("vit_b_16", 2).state_dict()
    assert state.keys() <= known.keys()


def of_torchvision_references(net: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """What references/classification/train.py of torchvision saves."""
    args = argparse.Namespace(model=SMALL, lr=0.1, output_dir="out", mixup_alpha=None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    states = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
    }
    torch.save({**states, "epoch": 3, "args": args}, path)


def of_timm(net: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """What timm's train.py saves, by its own saver."""
    from timm.utils import CheckpointSaver

    args = argparse.Namespace(model=SMALL, lr=0.1, mean=None, img_size=(3, 32, 32))
    saver = CheckpointSaver(net, optimizer, args=args, checkpoint_dir=str(path.parent))
    saver.save_checkpoint(3, metric=np.float64(76.5))
    (path.parent / "last.pth.tar").rename(path)


@pytest.mark.parametrize("trainer", [of_torchvision_references, of_timm])
def test_checkpoints_of_other_trainers_are_read(trainer, tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    network(torch.rand(2, 3, 5, 5)).sum().backward()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    trainer(network, optimizer, tmp_path / "theirs.pth.tar")
    # the control: torch alone refuses the command's arguments
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "theirs.pth.tar", weights_only=True)
    before = set(torch.serialization.get_safe_globals())
    read = read_file(tmp_path / "theirs.pth.tar")
    assert read.state.keys() == network.state_dict().keys()
    assert all(read.state[key].equal(value) for key, value in network.state_dict().items())
    assert set(torch.serialization.get_safe_globals()) == before  # others stay as strict


def read_folder_of_timm(path: Path) -> Any:
    """The file as the weights in a folder of timm."""
    folder = path.parent / "folder"
    folder.mkdir()
    about = {"architecture": "resnet18", "num_classes": 7, "label_names": CATEGORIES}
    config = timm.get_pretrained_cfg("resnet18").to_dict()
    (folder / "config.json").write_text(json.dumps({**about, "pretrained_cfg": config}))
    shutil.copy(path, folder / "pytorch_model.bin")
    return read_weights(str(folder), "timm/resnet18")


READERS: dict[str, Callable[[Path], Any]] = {
    "weights": read_file,
    "weights of timm": lambda path: read_weights(str(path), "timm/resnet18"),
    "a folder of timm": read_folder_of_timm,
    "a checkpoint": load_safely,
    "a checkpoint of ours": read_checkpoint,
    "a fit that is resumed": AtomicCheckpointIO().load_checkpoint,
    "a prediction": Predictor,
}


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


def written(content: Callable[[Any], Any], is_zip: bool = True) -> Callable[[Path, Path], Any]:
    def write(path: Path, canary: Path) -> None:
        torch.save(content(Canary(canary)), path, _use_new_zipfile_serialization=is_zip)

    return write


HIDDEN = {
    "alone": lambda code: code,
    "in the arguments": lambda code: {"model": STATE, "args": argparse.Namespace(lr=[code])},
    "in a score": lambda code: {"state_dict": STATE, "metric": Scalar(Path(code.path))},
    "as a key": lambda code: {"state_dict": STATE, (code,): 1},
    "among the weights": lambda code: {"state_dict": {**STATE, "fc.weight": code}},
    "in the hyperparameters": lambda code: {"state_dict": STATE, "hyper_parameters": {"a": code}},
    "behind an ordered dict": lambda code: collections.OrderedDict(STATE, extra={"a": (code,)}),
}
UNTRUSTED = {
    **{place: written(content) for place, content in HIDDEN.items()},
    **{f"{place}, old format": written(content, False) for place, content in HIDDEN.items()},
    "a bare pickle": lambda path, canary: path.write_bytes(pickle.dumps(Canary(canary))),
}


@promise("no-code")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("file", UNTRUSTED)
def test_no_code_of_an_untrusted_file_runs(file, reader, tmp_path):
    path, canary = tmp_path / "theirs.ckpt", tmp_path / "ran"
    UNTRUSTED[file](path, canary)
    with pytest.raises(ValueError, match=r"theirs\.ckpt|pytorch_model\.bin") as caught:
        READERS[reader](path)
    line = str(caught.value)
    assert "\n" not in line and "weights_only" not in line and not canary.exists()


@control("no-code")
@pytest.mark.parametrize("file", UNTRUSTED)
def test_control_torch_alone_would_run_it(file, tmp_path):
    path, canary = tmp_path / "theirs.ckpt", tmp_path / "ran"
    UNTRUSTED[file](path, canary)
    with suppress(Exception):  # NumPy's, say, which comes after the folder was made
        torch.load(path, weights_only=False)
    if not canary.exists():
        pickle.loads(path.read_bytes())
    assert canary.is_dir()


def compressed(path: Path) -> None:
    """Unpacked, a small file could take all memory."""
    torch.save({"state_dict": STATE}, path.with_name("stored"))
    with (
        zipfile.ZipFile(path.with_name("stored")) as stored,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for entry in stored.infolist():
            deflated.writestr(entry.filename, stored.read(entry))


def overlapping(path: Path) -> None:
    """Two entries of the central directory for one record."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", bytes(10_000))
        archive.filelist.append(copy.copy(archive.infolist()[0]))


def cut(path: Path) -> None:
    torch.save({"state_dict": STATE}, path)
    path.write_bytes(path.read_bytes()[:1000])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
# how a file is made, and the words for a reader of weights and for one of checkpoints
NO_WEIGHTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a photo": (lambda path: Image.new("RGB", (8, 8)).save(path, "jpeg"), "", "begins with"),
    "a config": (lambda path: path.write_text("model:\n"), "not a file of torch", "'model:"),
    "nothing": (lambda path: path.touch(), "damaged", "empty"),
    "half of it": (cut, "damaged", "damaged"),
    "a compressed archive": (compressed, "compressed", "compressed"),
    "an overlapping archive": (overlapping, "compressed", "compressed"),
    "a Git LFS pointer": (
        lambda path: path.write_text(POINTER),
        "`git lfs pull`",
        "`git lfs pull`",
    ),
    "a list": (lambda path: torch.save([1, 2], path), "named tensors", ""),
    "numbers for names": (
        lambda path: torch.save({"state_dict": {1: torch.ones(2)}}, path),
        "named tensors",
        "",
    ),
    "a whole network": (
        lambda path: torch.save(nn.Linear(1, 1), path),
        "torch.save(model.state_dict()",
        "torch.nn.modules.linear.Linear",
    ),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_a_file_that_is_no_checkpoint_is_named_in_a_line(kind, tmp_path):
    make, of_weights, of_checkpoints = NO_WEIGHTS[kind]
    path = tmp_path / "some.ckpt"
    make(path)
    readers = {read_file: of_weights, read_checkpoint: of_checkpoints}
    if of_checkpoints:  # which looks at the file alone
        readers[AtomicCheckpointIO().load_checkpoint] = of_checkpoints
    for reader, words in readers.items():
        with pytest.raises(ValueError, match=r"some\.ckpt") as caught:
            reader(path)
        line = str(caught.value)
        assert words in line and "\n" not in line and len(line) < 400
        assert "weights_only" not in line  # torch advises to run the code
