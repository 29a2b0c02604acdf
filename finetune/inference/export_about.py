"""The description of an exported file, in the .json next to it."""

from collections.abc import Mapping
from typing import Any

from finetune.data.resize import PADDING
from finetune.data.transforms import resized_side
from finetune.inference.export_check import Agreement
from finetune.inference.predictor import Predictor
from finetune.runs.exported_files import begun_with, licence_of
from finetune.settings.schema import CROP_SHARE
from finetune.training.calibration import Calibration


def about(
    predictor: Predictor,
    checkpoint: Mapping[str, Any],
    format: str,
    agreements: Mapping[str, Agreement],
) -> dict[str, Any]:
    """Return the description as plain values.

    Args:
        predictor: The predictor of the checkpoint.
        checkpoint: The result of `read_checkpoint`.
        format: Format of the file: a key of `WRITERS` in `exporters`, or `timm`, where the head scales the logits.
        agreements: Results of the comparisons with the checkpoint, by their key in the description.
    """
    calibration = predictor.calibration
    if format == "timm":
        calibration = calibration.without_scaling()
    return {
        "format": format,
        "backbone": predictor.backbone,
        "members": predictor.num_members,
        **({"head_stages": predictor.head_stages} if predictor.head_stages > 1 else {}),
        "class_names": predictor.class_names,
        **_inputs_and_outputs(predictor, format),
        "preparation": _preparation(predictor),
        "mean": (predictor.model.mean.flatten() / 255).tolist(),
        "std": (predictor.model.std.flatten() / 255).tolist(),
        **_decisions(predictor, calibration),
        "calibration": calibration.as_plain(),
        "began_with": begun_with(checkpoint),
        "licence_of_the_weights": licence_of(checkpoint),
        "versions": predictor.versions,
        **{name: agreement.as_plain() for name, agreement in agreements.items()},
    }


def _preparation(predictor: Predictor) -> str:
    """Return how images are resized and cropped, in words."""
    size = predictor.image_size
    settings = predictor.preparation
    resized = resized_side(size, settings.get("crop_share", CROP_SHARE))
    steps = {
        "shorter_side": f"resize until the shorter side has {resized} pixels, then take the middle {size} x {size}",
        "squash": f"resize to {resized} x {resized} pixels, then take the middle {size} x {size}",
        "whole": f"resize to {size} x {size} pixels",
        "pad": f"resize until the longer side has {size} pixels, put it in the middle of {size} x {size} pixels; the "
        f"rest is {PADDING}",
    }
    interpolation = settings.get("interpolation", "bilinear")
    return f"{steps[settings['resize']]}; {interpolation}, antialiased where it gets smaller"


def _inputs_and_outputs(predictor: Predictor, format: str) -> dict[str, Any]:
    size = predictor.image_size
    logits = {"logits": ["N", "K", "float32"]}
    if format in ("safetensors", "timm"):  # the file holds weights only
        return {
            "input": {"images": ["N", 3, size, size, "float32, normalised"]},
            "output": logits,
        }
    return {
        "input": {"images": ["N", size, size, 3, "uint8 RGB"]},
        "output": {"probabilities": ["N", "K", "float32"], **logits},
    }


def _decisions(predictor: Predictor, calibration: Calibration) -> dict[str, Any]:
    """Return what turns logits into probabilities and decisions, beyond the plain calibration."""
    if calibration.label_kind == "single":
        return {"temperature": calibration.temperature}
    names = predictor.class_names
    return {
        "label_kind": predictor.label_kind,
        "probabilities": "sigmoid(scale * logit + bias) of each label",
        "scale": list(calibration.scale),
        "bias": list(calibration.bias),
        "thresholds": dict(zip(names, calibration.thresholds, strict=True)),
    }
