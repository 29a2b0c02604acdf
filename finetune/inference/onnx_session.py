"""Runs an .onnx by onnxruntime on the CPU."""

import os
from typing import Any

import torch

from finetune.system.messages import install


def forbid_telemetry() -> None:
    """Disable the telemetry of onnxruntime (1.32), which writes an identifier into the user's folders.

    This must run before onnxruntime is imported.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def open_session(path: str) -> Any:
    """Return an onnxruntime session of a file, with as many threads as torch uses."""
    forbid_telemetry()
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"an .onnx file needs onnxruntime: {install('export')}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise ValueError(
            f"{path!r} cannot be run by onnxruntime: {str(error).strip().splitlines()[0]}"
        ) from error
