"""Writes a network to a file: ONNX or safetensors."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from finetune.inference.end_to_end import EndToEnd
from finetune.runs.exported_files import KEY
from finetune.system.messages import WrongUsage, only_errors

OPSET = 20  # ONNX operator set, the one that torch's exporter supports best


def write_onnx(module: EndToEnd, image_size: int, description: str, path: Path) -> None:
    """Write one .onnx file that contains the weights and takes batches of any size.

    Args:
        module: The module to export, on the CPU and in evaluation mode.
        image_size: Side of the input images in pixels.
        description: JSON that goes into the metadata of the file.
        path: The file.
    """
    import onnx
    import onnxscript  # noqa: F401 - torch's exporter needs it, and its own error has many lines

    with quiet():
        program = torch.onnx.export(
            module,
            # two images, since the exporter would treat a batch of one as a constant
            (torch.zeros(2, image_size, image_size, 3, dtype=torch.uint8),),
            input_names=["images"],
            output_names=["probabilities", "logits"],
            dynamic_shapes={"images": {0: "batch"}},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    graph = model.graph
    parts = (graph.node, graph.value_info, graph.initializer, graph.input, graph.output)
    for part in (*chain(*parts), graph, *model.functions):
        del part.metadata_props[:]  # stack traces with the paths of source files
    onnx.helper.set_model_props(model, {KEY: description})
    onnx.checker.check_model(model)
    onnx.save_model(model, path)  # one file, weights included


def write_weights(module: EndToEnd, image_size: int, description: str, path: Path) -> None:
    """Write the weights as .safetensors, with the parameter names of torchvision or timm."""
    from safetensors.torch import save

    state = {name: value.contiguous() for name, value in module.network.state_dict().items()}
    path.write_bytes(save(state, {KEY: description}))


# The suffix of each format that is a file, and the function that writes it. `finetune export --format` has these names
# and `timm`. `export_check.load_exported` reads each suffix.
WRITERS = {
    "onnx": (".onnx", write_onnx),
    "safetensors": (".safetensors", write_weights),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress log messages and warnings of torch's exporter and of onnxruntime, which logs to the root logger."""
    exporters = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
    with only_errors("root", *exporters), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def format_of(target: str) -> str:
    """Return the format that a target means, by its name or by the suffix of a file.

    Raises:
        WrongUsage: The target is neither a format nor a path with one of their suffixes.
    """
    formats = {suffix: name for name, (suffix, _) in WRITERS.items()} | {".timm": "timm"}
    format = target if target in formats.values() else formats.get(Path(target).suffix)
    if format is None:
        valid = (
            f"a format ({', '.join(formats.values())}) or a path that ends in {', '.join(formats)}"
        )
        raise WrongUsage(f"target must be {valid}, not {target!r}")
    return format
