"""What a person or a program has to know of an exported file, as the .json beside it says it."""

from collections.abc import Mapping
from typing import Any

from finetune.data.transforms import CROP_SHARE, resized_side
from finetune.inference.export_check import Agreement
from finetune.inference.predictor import Predictor
from finetune.runs.exported_files import InputSize, begun_with, licence_of


def about(
    predictor: Predictor,
    checkpoint: Mapping[str, Any],
    format: str,
    takes: InputSize,
    found: Mapping[str, Agreement],
) -> dict[str, Any]:
    """Return it as plain values.

    Args:
        predictor: Of the checkpoint.
        checkpoint: As `read_checkpoint` gives it.
        format: The kind of file.
        takes: Pictures of which size.
        found: How well the file agrees, or what it was made of, by the name that says which.
    """
    size, how = predictor.image_size, predictor.preparation
    resized = resized_side(size, how.get("crop_share", CROP_SHARE))
    ways = {
        "shorter_side": f"resize until the shorter side has {resized} pixels, then take the middle {size} x {size}",
        "squash": f"resize to {resized} x {resized} pixels, then take the middle {size} x {size}",
        "whole": f"resize to {size} x {size} pixels",
    }
    preparation = f"{ways[how['resize']]}; {how.get('interpolation', 'bilinear')}, antialiased where it gets smaller"
    is_whole, is_any = format != "safetensors", takes == "any_size"
    whole = ["N", *(("H", "W") if is_any else (size, size)), 3, "uint8 RGB"]
    return {
        "format": format,
        "backbone": predictor.backbone,
        "members": predictor.num_members,
        "class_names": predictor.class_names,
        "input": {"images": whole if is_whole else ["N", 3, size, size, "float32, normalised"]},
        "output": {
            **({"probabilities": ["N", "K", "float32"]} if is_whole else {}),
            "logits": ["N", "K", "float32"],
        },
        "preparation": f"inside: {preparation}" if is_any else preparation,
        "mean": (predictor.model.mean.flatten() / 255).tolist(),
        "std": (predictor.model.std.flatten() / 255).tolist(),
        "temperature": predictor.calibration.temperature,
        "calibration": predictor.calibration.as_plain(),
        "began_with": begun_with(checkpoint),
        "licence_of_the_weights": licence_of(checkpoint),
        "versions": predictor.versions,
        **{name: _agreement(one) for name, one in found.items()},
    }


def _agreement(found: Agreement) -> dict[str, Any]:
    return {
        "num_pictures": found.num_pictures,
        "largest_difference": found.largest,
        "milliseconds_of_the_network": round(found.milliseconds[0], 3),
        "milliseconds_of_the_file": round(found.milliseconds[1], 3),
    }
