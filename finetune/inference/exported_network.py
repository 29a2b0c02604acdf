"""An exported file in the place of the network, so that commands which take a checkpoint also take the file."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.inference.onnx_session import open_session
from finetune.models.image_classifier import ImageClassifier
from finetune.runs.exported_files import ExportedCheckpoint


class ExportedNetwork(nn.Module):
    """A file of `finetune export` as a network that onnxruntime computes on the CPU.

    Args:
        path: The .onnx. It contains the normalization.
        num_classes: Expected number of classes.

    Raises:
        ValueError: onnxruntime is missing or cannot run the file.
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
    session = open_session(path)
    name = session.get_inputs()[0].name
    return lambda images: session.run(["logits"], {name: images})[0]


def put_exported(model: ImageClassifier, checkpoint: Mapping[str, Any]) -> None:
    """Replace the network by the exported file, if the checkpoint was read from one that contains the network."""
    if isinstance(checkpoint, ExportedCheckpoint) and checkpoint.has_network:
        num_classes = len(checkpoint["hyper_parameters"]["class_names"])
        model.network = ExportedNetwork(str(checkpoint.path), num_classes)
