"""An exported .onnx in the place of the network, so that commands which take a checkpoint also take the file."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models.image_classifier import ImageClassifier
from finetune.runs.exported_files import ExportedCheckpoint
from finetune.system.messages import install

PREPARED = "prepared"  # the tensor of prepared images in a file that takes images of any size


class OnnxNetwork(nn.Module):
    """A file of `finetune export --format onnx` as a network that onnxruntime computes on the CPU.

    The input is prepared already. Of a file that takes images of any size, only the part after the preparation runs.

    Args:
        path: The file. It contains the normalization.
        num_classes: Expected number of classes.

    Raises:
        ValueError: onnxruntime is missing or cannot run the file.
    """

    def __init__(self, path: str, num_classes: int) -> None:
        super().__init__()
        self.path = path
        self.num_classes = num_classes
        self.session = _open_prepared(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "session": None}  # a session cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.session = _open_prepared(self.path)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, h, w) whose values are whole numbers from 0 to 255."""
        images = pixels.to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        (logits,) = self.session.run(["logits"], {self.session.get_inputs()[0].name: images})
        if logits.shape != (len(images), self.num_classes):
            shape = f"its logits of {len(images)} images have the shape {logits.shape}"
            raise ValueError(f"{self.path} names {self.num_classes} classes, but {shape}")
        return torch.from_numpy(logits).to(pixels.device, pixels.dtype)


def forbid_telemetry() -> None:
    """Disable the telemetry of onnxruntime (1.32), which writes an identifier into the user's folders.

    This must run before onnxruntime is imported.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def _open_prepared(path: str) -> Any:
    """Return a session that takes prepared images: of the whole file, or of the graph after `PREPARED`."""
    session = open_session(path)
    if all(type(side) is int for side in session.get_inputs()[0].shape[1:]):
        return session
    import onnx

    try:
        network = onnx.utils.Extractor(onnx.load(path)).extract_model([PREPARED], ["logits"])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{path!r} takes images of any size, but was not written by `finetune export`"
        ) from error
    return open_session(path, network.SerializeToString())


def open_session(path: str, content: bytes | None = None) -> Any:
    """Return an onnxruntime session of a file, or of its content, with as many threads as torch uses."""
    forbid_telemetry()
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"an .onnx file needs onnxruntime: {install('export')}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(
            content or path, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise ValueError(
            f"{path!r} cannot be run by onnxruntime: {str(error).strip().splitlines()[0]}"
        ) from error


def put_exported(model: ImageClassifier, checkpoint: Mapping[str, Any]) -> None:
    """Replace the network by the .onnx file if the checkpoint was read from one."""
    if isinstance(checkpoint, ExportedCheckpoint) and checkpoint.is_onnx:
        num_classes = len(checkpoint["hyper_parameters"]["class_names"])
        model.network = OnnxNetwork(str(checkpoint.path), num_classes)
