"""An exported file in the place of the network, so that commands which take a checkpoint also take the file."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.inference.onnx_session import open_prepared
from finetune.inference.openvino_model import open_model
from finetune.models.image_classifier import ImageClassifier
from finetune.runs.exported_files import ExportedCheckpoint


class ExportedNetwork(nn.Module):
    """A file of `finetune export` as a network that onnxruntime or OpenVINO computes on the CPU.

    The input is prepared already. Of a file that takes images of any size, only the part after the preparation runs.

    Args:
        path: The .onnx or .xml. It contains the normalization.
        num_classes: Expected number of classes.

    Raises:
        ValueError: The package that runs the file is missing or cannot run it.
    """

    def __init__(self, path: str, num_classes: int) -> None:
        super().__init__()
        self.path = path
        self.num_classes = num_classes
        self.logits = _open(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "logits": None}  # a session cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.logits = _open(self.path)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, h, w) whose values are whole numbers from 0 to 255."""
        images = pixels.to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        logits = self.logits(images)
        if logits.shape != (len(images), self.num_classes):
            shape = f"its logits of {len(images)} images have the shape {logits.shape}"
            raise ValueError(
                f"{self.path} describes {self.num_classes} classes, but {shape}: export the checkpoint again"
            )
        return torch.from_numpy(logits).to(pixels.device, pixels.dtype)


def _open(path: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from prepared images (N, h, w, 3) uint8 to logits (N, K)."""
    if Path(path).suffix == ".xml":
        return open_model(path, "logits")
    session = open_prepared(path)
    name = session.get_inputs()[0].name
    return lambda images: session.run(["logits"], {name: images})[0]


def put_exported(model: ImageClassifier, checkpoint: Mapping[str, Any]) -> None:
    """Replace the network by the exported file, if the checkpoint was read from one that contains the network."""
    if isinstance(checkpoint, ExportedCheckpoint) and checkpoint.has_network:
        num_classes = len(checkpoint["hyper_parameters"]["class_names"])
        model.network = ExportedNetwork(str(checkpoint.path), num_classes)
