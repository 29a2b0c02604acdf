"""`finetune export`: a checkpoint as a file that other programs take, held against the network before it is kept."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

import finetune
from finetune.commands.trust import data_settings
from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.synthetic import TARGET_CLASSES, draw
from finetune.data.decode import decode
from finetune.data.readers import files_to_predict
from finetune.data.samplers import ESTIMATE, SHEET, some_of
from finetune.data.transforms import resized_side
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_check import Agreement, hold_against, opened
from finetune.inference.exporters import WRITERS
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import begun_with, packed
from finetune.system.files import check_target, replace_text, replacing
from finetune.system.messages import WrongUsage

_MOST = 64  # pictures that are held against the network
_NUM_CALIBRATED, _MOST_TESTED = 200, 2000  # pictures, for int8


def export(
    ckpt_path: str,
    format: Literal["onnx", "torch", "safetensors"] = "onnx",
    output: str | None = None,
    verify_on: str | None = None,
    quantize: Literal["int8"] | None = None,
    root: str | None = None,
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
        quantize: int8 makes an .onnx of a quarter of the size, adjusted on 200 training pictures and measured on test
            pictures. It is not kept if it loses more than a point of accuracy, or is no faster on this machine.
        root: Folder of the data set for int8; null for where the checkpoint's run had it.
    """
    suffix, write = WRITERS[format]
    checkpoint = read_checkpoint(ckpt_path)
    if "exported" in checkpoint:
        raise WrongUsage(f"{ckpt_path} is an exported file: give the checkpoint that it was made of")
    if root and not quantize:
        raise WrongUsage("--root is for --quantize int8")
    if quantize and format != "onnx":
        raise WrongUsage(f"--quantize int8 makes an .onnx, not --format {format}")
    target = Path(output) if output else Path(ckpt_path).with_suffix(f".int8{suffix}" if quantize else suffix)
    if target.suffix != suffix:
        raise WrongUsage(f"--output {output}: a file of --format {format} is a {suffix}")
    check_target(target, "--output")
    predictor = Predictor(ckpt_path)
    data = _data(checkpoint, root, predictor.class_names) if quantize else None
    images, pictures = _pictures(predictor, verify_on)
    model, temperature = predictor.model, predictor.calibration.temperature
    module = EndToEnd(model.network, model.mean, model.std, temperature).eval()
    print(f"writing {model.backbone} as {target.name}, which takes some seconds", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        file = Path(folder) / target.name
        write(module, predictor.image_size, packed(checkpoint), file)
        found = hold_against(predictor, opened(file), images)
        if not found.is_good:
            differs = f"a probability differs by {found.largest:.1e}, {found.num_other} have another class"
            where = f"on {found.num_pictures} {pictures}"
            raise ValueError(f"the {suffix} was not kept, for it does not say what the network says: {where} {differs}")
        about = _about(predictor, begun_with(checkpoint), format, found)
        said = (
            f"held against the network on {found.num_pictures} {pictures}: the same classes, largest difference of a "
            f"probability {found.largest:.1e}; one picture at a time the network takes {found.milliseconds[0]:.1f} ms, "
            f"the file {found.milliseconds[1]:.1f} ms"
        )
        if data is not None:
            file, about["quantized"], said = _quantized(predictor, file, data)
        with replacing(target) as temporary:
            os.replace(file, temporary)
    beside = target.with_name(f"{target.name}.json")
    replace_text(beside, json.dumps(about, indent=2) + "\n")
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB), and {beside.name} about it")
    print(said)


def _data(checkpoint: dict[str, Any], root: str | None, class_names: list[str]) -> ImageDataModule:
    """Return the pictures that a checkpoint was trained and tested on."""
    settings = data_settings(checkpoint, [])
    if settings["class_path"].rpartition(".")[0] != "finetune":
        raise WrongUsage(f"--quantize int8 knows finetune's own data sets, not {settings['class_path']}")
    kind = getattr(finetune, settings["class_path"].rpartition(".")[2])
    place = root or settings["init_args"].get("root") or kind.default_root
    if not place or not Path(place).exists():
        gone = "the pictures of the checkpoint's run are not in" if root is None else "there is no folder"
        raise WrongUsage(f"{gone} {place}: --quantize int8 needs them, with --root FOLDER")
    data: ImageDataModule = kind(**{**settings["init_args"], "root": place, "num_workers": 0})
    if data.class_names != class_names:
        raise WrongUsage(f"{place} has other classes than the checkpoint")
    if not {"train", "test"} <= data.splits.keys():
        raise WrongUsage(f"--quantize int8 needs training and test pictures; {place} lacks some")
    return data


def _quantized(predictor: Predictor, source: Path, data: ImageDataModule) -> tuple[Path, dict[str, Any], str]:
    """Return the file in int8, what is to be known of it, and the same in words."""
    from finetune.inference.quantize import compare, in_batches, quantize

    train, test = data.splits["train"], data.splits["test"]
    target = source.with_name(f"int8.{source.name}")
    some = some_of(len(train.labels), _NUM_CALIBRATED, ESTIMATE)
    quantize(source, target, in_batches(predictor, train, some, "adjusting int8"))
    loss = compare(predictor, source, target, test, np.sort(some_of(len(test.labels), _MOST_TESTED, ESTIMATE)))
    if loss.reason_against:
        raise ValueError(f"the int8 file was not kept: {loss.reason_against}, on {loss.num_pictures} test pictures")
    said = (
        f"int8 on {loss.num_pictures} test pictures: accuracy {loss.accuracy[1]:.4f}, where float has "
        f"{loss.accuracy[0]:.4f}, and {loss.num_other} have another class; one picture at a time takes "
        f"{loss.milliseconds[1]:.1f} ms, in float {loss.milliseconds[0]:.1f} ms"
    )
    return target, loss._asdict(), said


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
    size, resized = predictor.image_size, resized_side(predictor.image_size)
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
