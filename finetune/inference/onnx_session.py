"""Runs an .onnx by onnxruntime on the CPU."""

import os
from typing import Any

import torch

from finetune.system.messages import install

PREPARED = "prepared"  # the tensor of prepared images in a file that takes images of any size


def forbid_telemetry() -> None:
    """Disable the telemetry of onnxruntime (1.32), which writes an identifier into the user's folders.

    This must run before onnxruntime is imported.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def open_prepared(path: str) -> Any:
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
