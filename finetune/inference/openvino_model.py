"""Runs a model of OpenVINO on the CPU."""

from collections.abc import Callable

import numpy as np
import torch

from finetune.system.openvino_import import openvino_core


def open_model(path: str, output: str) -> Callable[[np.ndarray], np.ndarray]:
    """Compile a model and return the function from images (N, h, w, 3) uint8 to one of its outputs.

    It computes in float32, with as many threads as torch uses.

    Args:
        path: The .xml. Its weights are in the .bin next to it.
        output: Name of the output.

    Raises:
        ValueError: OpenVINO is missing or cannot run the model.
    """
    core = openvino_core()
    # On a CPU with bf16 instructions, OpenVINO uses them by default: a probability of a ResNet-18 moved by 0.003.
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    try:
        model = core.compile_model(path, "CPU", settings)
        port = model.output(output)
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise ValueError(f"{path!r} cannot be run by OpenVINO: {lines[-1]}") from error
    # a new request for each call, since a server calls this from several threads
    return lambda images: model.infer_new_request([images])[port]
