"""Writes a network as a package of Core ML for Apple's systems, which no other system can run.

So the exported program is verified, and then the description and the normalization in the package are checked.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_check import PredictionFunction
from finetune.inference.exporters import quiet
from finetune.inference.predictor import Predictor
from finetune.runs.exported_files import KEY
from finetune.system.messages import install

# Shapes: N images of h x w pixels, K classes or labels.

COREML_FILES = (
    "Data/com.apple.CoreML/model.mlmodel",
    "Data/com.apple.CoreML/weights/weight.bin",
    "Manifest.json",
)
_INPUT = "image"
_PROBABILITIES = "probabilities"


class _OneImage(nn.Module):
    """An image (1, 3, h, w) float32 from 0 to 255, as Core ML passes it, to probabilities (1, K)."""

    def __init__(self, module: EndToEnd) -> None:
        super().__init__()
        self.module = module

    def forward(self, image: Tensor) -> Tensor:
        probabilities: Tensor = self.module(image.permute(0, 2, 3, 1))[0]
        return probabilities


def exported_program(predictor: Predictor) -> torch.export.ExportedProgram:
    """Return the program that `write_package` converts."""
    module = _OneImage(EndToEnd(predictor.model, predictor.calibration)).eval()
    side = predictor.image_size
    return torch.export.export(module, (torch.zeros(1, 3, side, side),)).run_decompositions({})


def runner(program: torch.export.ExportedProgram) -> PredictionFunction:
    """Return the function of a program, from images (N, h, w, 3) uint8 to probabilities (N, K)."""
    module = program.module()

    def run(images: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        with torch.no_grad():
            return np.concatenate([module(image[None]).numpy() for image in pixels])

    return run


def write_package(
    program: torch.export.ExportedProgram, predictor: Predictor, description: str, folder: Path
) -> None:
    """Convert a program, and check the package.

    Args:
        program: The result of `exported_program`.
        predictor: The checkpoint.
        description: JSON that goes into the metadata of the package.
        folder: The package, a folder that does not exist yet. Its name ends in .mlpackage.

    Raises:
        ValueError: coremltools is missing, or the package is not as it should be.
    """
    coremltools = import_coremltools()
    side = predictor.image_size
    image = coremltools.ImageType(
        name=_INPUT, shape=(1, 3, side, side), color_layout=coremltools.colorlayout.RGB
    )
    if predictor.label_kind == "single":
        kind = {"classifier_config": coremltools.ClassifierConfig(predictor.class_names)}
    else:
        kind = {"outputs": [coremltools.TensorType(name=_PROBABILITIES)]}
    with _quiet():
        model = coremltools.convert(
            program,
            inputs=[image],
            convert_to="mlprogram",
            # half precision would move probabilities by more than the verification allows
            compute_precision=coremltools.precision.FLOAT32,
            minimum_deployment_target=coremltools.target.iOS15,
            skip_model_load=True,
            **kind,
        )
        model.user_defined_metadata[KEY] = description
        model.save(str(folder))
    check_package(folder, predictor)


def check_package(folder: Path, predictor: Predictor) -> None:
    """Check the input, the classes and the normalization of a package.

    Raises:
        ValueError: They are not those of the checkpoint.
    """
    with _quiet():
        package = import_coremltools().models.MLModel(str(folder), skip_model_load=True)
    spec = package.get_spec()
    side = predictor.image_size
    (image,) = spec.description.input
    if image.name != _INPUT or not _is_rgb(image.type.imageType, side):
        raise ValueError(f"the package was discarded: it does not take RGB images of {side} pixels")
    function = spec.mlProgram.functions["main"]
    operations = function.block_specializations[function.opset].operations
    expected = [predictor.class_names] if predictor.label_kind == "single" else []
    if [_classes(each) for each in operations if each.type == "classify"] != expected:
        raise ValueError("the package was discarded: its classes are not those of the checkpoint")
    model = predictor.model
    if not _normalises(operations, model.mean.flatten(), model.std.flatten()):
        raise ValueError("the package was discarded: it does not normalise as the checkpoint")


def _is_rgb(image: Any, side: int) -> bool:
    return (image.height, image.width, image.colorSpace) == (side, side, image.RGB)


def _classes(classify: Any) -> list[str]:
    (argument,) = classify.inputs["classes"].arguments
    names = argument.value.immediateValue.list.values
    return [name.immediateValue.tensor.strings.values[0] for name in names]


def _normalises(operations: Sequence[Any], mean: Tensor, std: Tensor) -> bool:
    """Return whether a program begins with (image - mean) / std, for each channel.

    coremltools multiplies instead of dividing, and omits a subtraction of zero.
    """
    constants = {
        each.outputs[0].name: np.array(each.attributes["val"].immediateValue.tensor.floats.values)
        for each in operations
        if each.type == "const"
    }
    name = _INPUT
    scale = np.ones(3)
    offset = np.zeros(3)
    for each in [operation for operation in operations if operation.type != "const"][:2]:
        if each.type not in ("sub", "mul") or _argument(each, "x") != name:
            return False
        name = each.outputs[0].name
        value = constants[_argument(each, "y")]
        if each.type == "sub":
            offset = offset - value
        else:
            scale = scale * value
            offset = offset * value
        if np.allclose(scale, 1 / std) and np.allclose(offset, -mean / std):
            return True
    return False


def _argument(operation: Any, name: str) -> str:
    return str(operation.inputs[name].arguments[0].name)


def import_coremltools() -> ModuleType:
    """Return the package `coremltools`.

    Raises:
        ValueError: It is not installed.
    """
    try:
        with _quiet():
            import coremltools
    except ImportError as error:
        raise ValueError(f"Core ML needs coremltools: {install('coreml')}") from error
    return coremltools


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress coremltools' progress bars, and its warnings that Core ML is not here and torch is newer than it."""
    with quiet(), redirect_stderr(io.StringIO()):
        yield
