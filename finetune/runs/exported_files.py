"""The metadata in the files of `finetune export`, with which they can be read as checkpoints.

A file holds nothing about the machine: no folders and no images, and only the name of the weights that
training started from. It holds hashes of the names of the training images, so that a test of the file can
exclude them.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from finetune.data.transforms import PREPARATION
from finetune.models.weight_files import EXPORTED as KEY
from finetune.runs.licence import licence
from finetune.system.messages import install

READABLE = (".onnx", ".safetensors")
_MODEL = (
    "class_names",
    "label_kind",
    "backbone",
    "head_stages",
    "label_smoothing",
    "class_weights",
    "network_size",
    "members",
)
_DATA = (
    *PREPARATION,
    "eval_image_size",
    "split_seed",
    "val_fraction",
    "test_fraction",
    "group_by",
    "num_folds",
    "fold",
)
_ORIGIN = ("version", "torch", "data_fingerprint", "calibration")


def packed(checkpoint: Mapping[str, Any]) -> str:
    """Return as JSON what testing, predicting and serving need of a checkpoint besides the network."""
    model = checkpoint["hyper_parameters"]
    data = checkpoint["datamodule_hyper_parameters"]
    origin = checkpoint["finetune"]
    seen = origin.get("seen")
    state = checkpoint["state_dict"]
    data_class = str(origin.get("data_class"))
    settings = {name: model[name] for name in _MODEL if name in model}
    plain = {
        "model": settings | {"weights": begun_with(checkpoint)},
        "licence_of_the_weights": licence_of(checkpoint),
        "data": {name: data[name] for name in _DATA if name in data},
        "origin": {name: origin.get(name) for name in _ORIGIN},
        "data_class": data_class
        if data_class.startswith("finetune.")
        else "finetune.ImageFolderData",
        "seen": seen and {name: _text(digests) for name, digests in seen.items()},
        "mean": state["mean"].flatten().tolist(),
        "std": state["std"].flatten().tolist(),
        "class_weight": state["class_weight"].tolist(),
    }
    return json.dumps(plain)


def begun_with(checkpoint: Mapping[str, Any]) -> str | None:
    """Return the name of the weights that training started from; of a file the name without its folder."""
    weights = checkpoint["finetune"].get("began_from") or checkpoint["hyper_parameters"]["weights"]
    return weights and PurePath(weights).name


def licence_of(checkpoint: Mapping[str, Any]) -> str:
    """Return the licence of the weights that training started from, in a sentence without folders."""
    recorded = checkpoint["finetune"].get("licence_of_the_weights")
    if recorded:
        return str(recorded)
    began_from = checkpoint["finetune"].get("began_from")
    backbone = checkpoint["hyper_parameters"]["backbone"]
    return licence(begun_with(checkpoint), backbone, began_from and PurePath(began_from).name)


class ExportedCheckpoint(dict[str, Any]):
    """The content of an exported file in the form of a checkpoint.

    Other modules recognise an exported file by this type: a key in the dict could come from any file.

    Attributes:
        path: The file. An .onnx contains the network. The weights of a .safetensors are in `state_dict`.
    """

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    @property
    def has_network(self) -> bool:
        return self.path.suffix == ".onnx"


def read_exported(path: str | Path) -> ExportedCheckpoint:
    """Read a file of `finetune export` in the form of a checkpoint.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or is not a file of `finetune export`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    text, state = _onnx(path) if Path(path).suffix == ".onnx" else _safetensors(path)
    if text is None:
        raise ValueError(
            f"{str(path)!r} was not written by `finetune export`: it has no class names"
        )
    try:
        plain = json.loads(text)
        _check(plain)
        seen = plain["seen"] and {
            name: _tensor(plain["seen"][name], np.int64) for name in ("train", "val")
        }
        # The network of an .onnx normalises by itself.
        mean, std = (plain["mean"], plain["std"]) if state else ([0.0] * 3, [1.0] * 3)
        state |= {
            name: torch.tensor(values).view(3, 1, 1)
            for name, values in (("mean", mean), ("std", std))
        }
        state["class_weight"] = torch.tensor(plain["class_weight"])
        origin = {**plain["origin"], "data_class": plain["data_class"], "seen": seen}
        content = {
            "hyper_parameters": plain["model"],
            "datamodule_hyper_parameters": plain["data"],
            "finetune": {**origin, "precision": "32-true", "train_metrics": None},
            "state_dict": state,
            # Lightning expects these keys in every checkpoint.
            "epoch": 0,
            "global_step": 0,
            "pytorch-lightning_version": pl.__version__,
        }
        return ExportedCheckpoint(content, Path(path))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:  # RuntimeError includes RecursionError
        raise ValueError(f"{str(path)!r} is damaged: its metadata is unreadable") from error


def _onnx(path: str | Path) -> tuple[str | None, dict[str, Tensor]]:
    try:
        import onnx
    except ImportError as error:
        raise ValueError(
            f"reading an .onnx file needs onnx and onnxruntime: {install('export')}"
        ) from error
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"{str(path)!r} is damaged, or not an .onnx file") from error
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _tensors(model)):
        raise ValueError(
            f"{str(path)!r} has its weights in other files, which `finetune export` never does"
        )
    return {prop.key: prop.value for prop in model.metadata_props}.get(KEY), {}


def _tensors(message: Any) -> Iterator[Any]:
    """Yield every tensor in an ONNX message, with those in subgraphs and attributes."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _tensors(inner)


def _check(plain: Any) -> None:
    """Check that mean, std and class weights of an exported file are usable.

    Raises:
        ValueError: They are not.
    """
    numbers = [*plain["mean"], *plain["std"], *plain["class_weight"]]
    is_sound = (
        len(plain["class_weight"]) == len(plain["model"]["class_names"])
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and len(plain["mean"]) == len(plain["std"]) == 3
        and min(plain["std"]) > 0
    )
    if not is_sound:
        raise ValueError("not as `finetune export` writes it")


def _safetensors(path: str | Path) -> tuple[str | None, dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            state = {f"network.{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return (file.metadata() or {}).get(KEY), state
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is damaged, or not a .safetensors file") from error


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _tensor(text: str, dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), dtype).copy())
