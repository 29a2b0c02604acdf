"""An exported network in the place of the one it was made of, so that `test`, `predict` and `sheet` work with it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.training.classifier import Classifier


class OnnxNetwork(nn.Module):
    """A file of `finetune export --format onnx` as a network, computed by onnxruntime on the CPU.

    Args:
        path: The file, which normalises by itself.

    Raises:
        ValueError: onnxruntime is missing or can't run the file.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.session = open_session(path)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) of grey levels (B, 3, h, w) that are whole numbers."""
        images = pixels.to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        (logits,) = self.session.run(["logits"], {"images": images})
        return torch.from_numpy(logits).to(pixels.device, pixels.dtype)


def open_session(path: str) -> Any:
    """Return onnxruntime's session of a file, with as many threads as torch has."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError("an .onnx file needs onnxruntime: pip install 'finetune[export]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime's own kinds
        raise ValueError(f"{path!r} can't be run by onnxruntime: {str(error).strip().splitlines()[0]}") from error


def put_exported(model: Classifier, checkpoint: Mapping[str, Any]) -> None:
    """Let a classifier compute with the file that its checkpoint was read from, if that holds the network itself."""
    path = checkpoint.get("exported", "")
    if path.endswith(".onnx"):
        model.network = OnnxNetwork(path)
