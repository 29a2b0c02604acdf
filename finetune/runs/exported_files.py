"""The metadata in the files of `finetune export`, with which they can be read as checkpoints.

A file holds nothing about the machine: no folders and no images, and only the name of the weights that
training started from. It holds hashes of the content of the training images, so that a test of the file
can exclude them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec
import numpy as np
import pytorch_lightning as pl
import torch
from msgspec import Meta, Struct
from torch import Tensor

from finetune.data.transforms import PREPARATION
from finetune.models.weight_files import EXPORTED as KEY
from finetune.runs.licence import licence

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
    "split_seed",
    "val_fraction",
    "test_fraction",
    "group_by",
    "num_folds",
    "fold",
)
_ORIGIN = ("version", "torch", "data_fingerprint", "calibration")
_Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]
_Positive = Annotated[float, Meta(gt=0, le=1e30)]


class _Seen(Struct):
    """The digests of the content of the images of each split, int64."""

    train: bytes
    val: bytes


class _Metadata(Struct):
    """What testing, predicting and serving need of a checkpoint besides the network."""

    model: dict[str, Any]
    data: dict[str, Any]
    origin: dict[str, Any]
    data_class: str
    licence_of_the_weights: str
    seen: _Seen | None
    mean: tuple[_Finite, _Finite, _Finite]
    std: tuple[_Positive, _Positive, _Positive]
    class_weight: list[_Finite]


def packed(checkpoint: Mapping[str, Any]) -> str:
    """Return as JSON what testing, predicting and serving need of a checkpoint besides the network."""
    model = checkpoint["hyper_parameters"]
    data = checkpoint["datamodule_hyper_parameters"]
    origin = checkpoint["finetune"]
    seen = origin.get("seen")
    state = checkpoint["state_dict"]
    data_class = str(origin.get("data_class"))
    is_ours = data_class.startswith("finetune.")
    settings = {name: model[name] for name in _MODEL if name in model}
    metadata = _Metadata(
        model=settings | {"weights": begun_with(checkpoint)},
        data={name: data[name] for name in _DATA if name in data},
        origin={name: origin.get(name) for name in _ORIGIN},
        data_class=data_class if is_ours else "finetune.ImageFolderData",
        licence_of_the_weights=licence_of(checkpoint),
        seen=seen and _Seen(**{name: digests.numpy().tobytes() for name, digests in seen.items()}),
        mean=tuple(state["mean"].flatten().tolist()),
        std=tuple(state["std"].flatten().tolist()),
        class_weight=state["class_weight"].tolist(),
    )
    return json.dumps(msgspec.to_builtins(metadata))


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
        metadata = msgspec.convert(json.loads(text), _Metadata)
        if len(metadata.class_weight) != len(metadata.model["class_names"]):
            raise ValueError("there is not one weight of each class")
        seen = metadata.seen and {
            "train": _digests(metadata.seen.train),
            "val": _digests(metadata.seen.val),
        }
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged: its metadata is unreadable") from error
    # The network of an .onnx normalises by itself.
    mean = metadata.mean if state else (0.0, 0.0, 0.0)
    std = metadata.std if state else (1.0, 1.0, 1.0)
    state |= {
        "mean": torch.tensor(mean).view(3, 1, 1),
        "std": torch.tensor(std).view(3, 1, 1),
        "class_weight": torch.tensor(metadata.class_weight),
    }
    own = {"data_class": metadata.data_class, "seen": seen}
    content = {
        "hyper_parameters": metadata.model,
        "datamodule_hyper_parameters": metadata.data,
        "finetune": {**metadata.origin, **own, "precision": "32-true", "train_metrics": None},
        "state_dict": state,
        # Lightning expects these keys in every checkpoint.
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": pl.__version__,
    }
    return ExportedCheckpoint(content, Path(path))


def _onnx(path: str | Path) -> tuple[str | None, dict[str, Tensor]]:
    import onnx
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


def _safetensors(path: str | Path) -> tuple[str | None, dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            state = {f"network.{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return (file.metadata() or {}).get(KEY), state
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is damaged, or not a .safetensors file") from error


def _digests(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.int64).copy())
