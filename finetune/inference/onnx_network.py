"""An exported network in the place of the one it was made of, so that all that takes a checkpoint works with it."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models.image_classifier import ImageClassifier
from finetune.runs.exported_files import ExportedCheckpoint
from finetune.system.messages import install

PREPARED = "prepared"  # what a file that takes pictures of any size makes of them, for its network


class OnnxNetwork(nn.Module):
    """A file of `finetune export --format onnx` as a network, computed by onnxruntime on the CPU.

    Of one that takes pictures of any size it is what follows their preparation, which is done already.

    Args:
        path: The file, which normalises by itself.
        num_classes: That it should have.

    Raises:
        ValueError: onnxruntime is missing or can't run the file.
    """

    def __init__(self, path: str, num_classes: int) -> None:
        super().__init__()
        self.path = path
        self.num_classes = num_classes
        self.session = _of_prepared(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "session": None}  # which can't go into another process

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.session = _of_prepared(self.path)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) of grey levels (B, 3, h, w) that are whole numbers."""
        images = pixels.to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        (logits,) = self.session.run(["logits"], {self.session.get_inputs()[0].name: images})
        if logits.shape != (len(images), self.num_classes):
            shape = f"its logits of {len(images)} pictures have the shape {logits.shape}"
            raise ValueError(f"{self.path} names {self.num_classes} classes, but {shape}")
        return torch.from_numpy(logits).to(pixels.device, pixels.dtype)


def forbid_telemetry() -> None:
    """Let onnxruntime (1.32) write no identifier into the user's folders and send nothing: before it is imported."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def _of_prepared(path: str) -> Any:
    """Return a session that takes prepared pictures: of the whole file, or of what follows `PREPARED` in it."""
    session = open_session(path)
    if all(type(side) is int for side in session.get_inputs()[0].shape[1:]):
        return session
    import onnx

    try:
        network = onnx.utils.Extractor(onnx.load(path)).extract_model([PREPARED], ["logits"])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{path!r} takes pictures of any size, but not as `finetune export` writes it"
        ) from error
    return open_session(path, network.SerializeToString())


def open_session(path: str, content: bytes | None = None) -> Any:
    """Return onnxruntime's session of a file, or of its content, with as many threads as torch has."""
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
    except Exception as error:  # of onnxruntime's own kinds
        raise ValueError(
            f"{path!r} can't be run by onnxruntime: {str(error).strip().splitlines()[0]}"
        ) from error


def put_exported(model: ImageClassifier, checkpoint: Mapping[str, Any]) -> None:
    """Replace the network by the .onnx file that a checkpoint was read from, if it was read from one."""
    if isinstance(checkpoint, ExportedCheckpoint) and checkpoint.is_onnx:
        num_classes = len(checkpoint["hyper_parameters"]["class_names"])
        model.network = OnnxNetwork(str(checkpoint.path), num_classes)
