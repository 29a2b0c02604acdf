"""A file of `finetune export` in the place of the network. onnxruntime computes it on the CPU."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models.image_classifier import ImageClassifier
from finetune.runs.exported_files import ExportedCheckpoint


class ExportedNetwork(nn.Module):
    """A file of `finetune export` as a network, so that commands which take a checkpoint also take the file.

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
        self.session = open_session(path)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, h, w) whose values are whole numbers from 0 to 255."""
        images = pixels.to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        (logits,) = self.session.run(["logits"], {self.session.get_inputs()[0].name: images})
        if logits.shape != (len(images), self.num_classes):
            shape = f"its logits of {len(images)} images have the shape {logits.shape}"
            raise ValueError(
                f"{self.path} describes {self.num_classes} classes, but {shape}: export the checkpoint again"
            )
        return torch.from_numpy(logits).to(pixels.device, pixels.dtype)


def put_exported(model: ImageClassifier, checkpoint: Mapping[str, Any]) -> None:
    """Replace the network by the exported file, if the checkpoint was read from one that contains the network."""
    if isinstance(checkpoint, ExportedCheckpoint) and checkpoint.has_network:
        num_classes = len(checkpoint["hyper_parameters"]["class_names"])
        model.network = ExportedNetwork(str(checkpoint.path), num_classes)


def forbid_telemetry() -> None:
    """Disable the telemetry of onnxruntime (1.32), which writes an identifier into the user's folders.

    This must run before onnxruntime is imported.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def open_session(path: str) -> Any:
    """Return an onnxruntime session of a file, with as many threads as torch uses."""
    forbid_telemetry()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise ValueError(
            f"{path!r} cannot be run by onnxruntime: {str(error).strip().splitlines()[0]}"
        ) from error
