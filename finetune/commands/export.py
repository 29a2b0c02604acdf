"""`finetune export`: a checkpoint as a file that other programs take, held against the network before it is kept."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finetune.data.datasets.synthetic import TARGET_CLASSES, draw
from finetune.data.decode import decode
from finetune.data.readers import files_to_predict
from finetune.data.samplers import SHEET, some_of
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_check import Agreement, hold_against, opened
from finetune.inference.exporters import WRITERS
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import begun_with, packed
from finetune.system.files import check_target, replace_text, replacing
from finetune.system.messages import WrongUsage

_MOST = 64  # pictures


def export(
    ckpt_path: str,
    format: Literal["onnx", "torch", "safetensors"] = "onnx",
    output: str | None = None,
    verify_on: str | None = None,
) -> None:
    """Write a checkpoint as a file for other programs, which says what the checkpoint says.

    An .onnx or .pt2 takes pictures of the network's size, (N, h, w, 3) uint8 RGB, and gives probabilities (N, K):
    normalisation and temperature are inside. A .safetensors has the weights. A .json beside it says the rest. The file
    is kept if its probabilities are those of the network to 1e-4, and its classes the same.

    Args:
        ckpt_path: A checkpoint of `finetune fit`.
        format: onnx for onnxruntime and most others, torch for `torch.export.load`, safetensors for the weights alone.
        output: The file; null for one beside the checkpoint.
        verify_on: Picture, folder, glob or text file with a path on each line, of which at most 64 are compared; drawn
            pictures where it is not given.
    """
    suffix, write = WRITERS[format]
    checkpoint = read_checkpoint(ckpt_path)
    if "exported" in checkpoint:
        raise WrongUsage(f"{ckpt_path} is an exported file: give the checkpoint that it was made of")
    target = Path(output) if output else Path(ckpt_path).with_suffix(suffix)
    if target.suffix != suffix:
        raise WrongUsage(f"--output {output}: a file of --format {format} is a {suffix}")
    check_target(target, "--output")
    predictor = Predictor(ckpt_path)
    images, pictures = _pictures(predictor, verify_on)
    module = EndToEnd(
        predictor.model.network, predictor.model.mean, predictor.model.std, predictor.calibration.temperature
    ).eval()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        file = Path(folder) / target.name
        write(module, predictor.image_size, packed(checkpoint), file)
        found = hold_against(predictor, opened(file), images)
        if not found.is_good:
            differs = f"a probability differs by {found.largest:.1e}, {found.num_other} have another class"
            where = f"on {found.num_pictures} {pictures}"
            raise ValueError(f"the {suffix} was not kept, for it does not say what the network says: {where} {differs}")
        with replacing(target) as temporary:
            os.replace(file, temporary)
    about = target.with_name(f"{target.name}.json")
    replace_text(about, json.dumps(_about(predictor, begun_with(checkpoint), format, found), indent=2) + "\n")
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB), and {about.name} about it")
    print(
        f"held against the network on {found.num_pictures} {pictures}: the same classes, largest difference of a "
        f"probability {found.largest:.1e}; one picture at a time the network takes {found.milliseconds[0]:.1f} ms, "
        f"the file {found.milliseconds[1]:.1f} ms"
    )


def _pictures(predictor: Predictor, verify_on: str | None) -> tuple[np.ndarray, str]:
    """Return prepared pictures (N, h, w, 3) and what they are."""
    if verify_on is None:
        drawn = (draw(name, (i,)) for i in range(_MOST // 2) for name in TARGET_CLASSES)
        return np.stack([predictor.prepare(picture) for picture in drawn]), "drawn pictures"
    paths = files_to_predict(verify_on)
    chosen = np.sort(some_of(len(paths), _MOST, SHEET))
    where = "picture" if len(paths) == 1 else "pictures"
    return np.stack([predictor.prepare(decode(paths[int(i)])) for i in chosen]), f"{where} of {verify_on}"


def _about(predictor: Predictor, weights: str | None, format: str, found: Agreement) -> dict[str, Any]:
    """Return what a person or a program has to know of the file."""
    size, resized = predictor.image_size, round(predictor.image_size * 256 / 224)
    ways = {
        "shorter_side": f"resize until the shorter side has {resized} pixels, then take the middle {size} x {size}",
        "squash": f"resize to {resized} x {resized} pixels, then take the middle {size} x {size}",
        "whole": f"resize to {size} x {size} pixels",
    }
    is_whole = format != "safetensors"
    takes = ["N", size, size, 3, "uint8 RGB"] if is_whole else ["N", 3, size, size, "float32, normalised"]
    return {
        "format": format,
        "backbone": predictor.model.backbone,
        "class_names": predictor.class_names,
        "input": {"images": takes},
        "output": {**({"probabilities": ["N", "K", "float32"]} if is_whole else {}), "logits": ["N", "K", "float32"]},
        "preparation": f"{ways[predictor.resize]}; bilinear, antialiased where it gets smaller",
        "mean": (predictor.model.mean.flatten() / 255).tolist(),
        "std": (predictor.model.std.flatten() / 255).tolist(),
        "temperature": predictor.calibration.temperature,
        "calibration": predictor.calibration.as_plain(),
        "began_with": weights,
        "versions": predictor.versions,
        "verified": {
            "num_pictures": found.num_pictures,
            "largest_difference": found.largest,
            "milliseconds_of_the_network": round(found.milliseconds[0], 3),
            "milliseconds_of_the_file": round(found.milliseconds[1], 3),
        },
    }
