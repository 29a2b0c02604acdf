"""Writes a network as a file of another kind: ONNX, torch.export's, safetensors."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from finetune.inference.end_to_end import EndToEnd
from finetune.runs.exported_files import KEY
from finetune.system.messages import WrongUsage, install

OPSET = 20  # of ONNX: what torch's exporter writes best


def write_onnx(module: EndToEnd, image_size: int, description: str, path: Path) -> None:
    """Write one .onnx file, weights included, for any number of pictures at a time.

    Args:
        module: What is written, on the CPU and in evaluation.
        image_size: Side in pixels of the pictures that it takes.
        description: What the file says of itself.
        path: The file.

    Raises:
        ValueError: A package is missing.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch's exporter imports it, and would say so in many lines
    except ImportError as error:
        raise ValueError(f"{error}: {install('export')}") from error
    with _quiet():
        program = torch.onnx.export(
            module,
            (_example(image_size),),
            input_names=["images"],
            output_names=["probabilities", "logits"],
            dynamic_shapes={"images": {0: "batch"}},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for part in (
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.initializer,
        *model.graph.input,
    ):
        del part.metadata_props[:]  # lines of our source with the folders that they lie in
    for part in (*model.graph.output, model.graph, *model.functions):
        del part.metadata_props[:]
    onnx.helper.set_model_props(model, {KEY: description})
    onnx.checker.check_model(model)
    onnx.save_model(model, path)  # with the weights, in one file


def write_program(module: EndToEnd, image_size: int, description: str, path: Path) -> None:
    """Write a .pt2 file for `torch.export.load`, likewise; its `extra_files` have the description."""
    with _quiet():
        batch = torch.export.Dim("batch")
        program = torch.export.export(
            module, (_example(image_size),), dynamic_shapes={"images": {0: batch}}
        )
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # as above
        content = io.BytesIO()  # where a disk is full torch ends the process
        torch.export.save(program, content, extra_files={KEY: description})
    path.write_bytes(content.getbuffer())


def write_weights(module: EndToEnd, image_size: int, description: str, path: Path) -> None:
    """Write the weights as .safetensors, by the names that the network's own library gives them."""
    from safetensors.torch import save

    state = {name: value.contiguous() for name, value in module.network.state_dict().items()}
    path.write_bytes(save(state, {KEY: description}))


WRITERS = {
    "onnx": (".onnx", write_onnx),
    "torch": (".pt2", write_program),
    "safetensors": (".safetensors", write_weights),
}


def _example(image_size: int) -> torch.Tensor:
    # Two, for the exporter takes one for a constant; black, for a .pt2 keeps them.
    return torch.zeros(2, image_size, image_size, 3, dtype=torch.uint8)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's words about its own steps off the screen."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def format_of(target: str) -> str:
    """Return the format that is meant by its name, or by the suffix of a file to write.

    Raises:
        WrongUsage: There is no such format.
    """
    formats = {suffix: name for name, (suffix, _) in WRITERS.items()}
    found = target if target in WRITERS else formats.get(Path(target).suffix)
    if found is None:
        valid = f"a format ({', '.join(WRITERS)}) or a file that ends in {', '.join(formats)}"
        raise WrongUsage(f"target must be {valid}, not {target!r}")
    return found
