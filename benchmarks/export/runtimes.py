"""Measure a ResNet-18 at 224 pixels as an .onnx in onnxruntime and as a model of OpenVINO.

    python -m benchmarks.export.runtimes [--rounds 15]

The weights are random: they do not change the speed. In each round both run the same images, one after the other, with
as many threads as torch uses, single images and batches of 32. The first calls of a turn do not count. Of the rounds'
ratios, the median, the smallest and the largest are printed, so that other work on the machine affects them little.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.documents import spread
from benchmarks.common.driver import command_line
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_check import PredictionFunction, load_exported
from finetune.inference.exporters import WRITERS
from finetune.models.backbones import build, normalization
from finetune.models.image_classifier import ImageClassifier
from finetune.training.calibration import Calibration

SIDE = 224
FORMATS = ("onnx", "openvino")
CALLS = {1: 8, 32: 1}  # in a turn, by the number of images


def export(folder: Path) -> dict[str, Path]:
    """Return a file of each format."""
    torch.manual_seed(0)
    mean, std = (255 * torch.tensor(v).view(3, 1, 1) for v in normalization("resnet18"))
    network = ImageClassifier(build("resnet18", 5), mean, std)
    module = EndToEnd(network, Calibration()).eval()
    paths = {}
    for name in FORMATS:
        suffix, write = WRITERS[name]
        paths[name] = folder / f"{name}{suffix}"
        write(module, SIDE, "", paths[name])
    return paths


def rate(run: PredictionFunction, images: np.ndarray) -> float:
    """Return images per second, after as many calls that do not count."""
    calls = CALLS[len(images)]
    for _ in range(calls):
        run(images)
    began = time.perf_counter()
    for _ in range(calls):
        run(images)
    return calls * len(images) / (time.perf_counter() - began)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        paths = export(Path(folder))
        for name, path in paths.items():
            num_bytes = sum(each.stat().st_size for each in path.parent.glob(f"{name}.*"))
            print(f"{name}: {num_bytes / 1e6:.1f} MB")
        runs = {name: load_exported(path) for name, path in paths.items()}
        rng = np.random.default_rng(0)
        for num_images in CALLS:
            images = rng.integers(0, 256, (num_images, SIDE, SIDE, 3), np.uint8)
            rates = [{name: rate(run, images) for name, run in runs.items()} for _ in range(rounds)]
            for name in FORMATS:
                median = statistics.median(each[name] for each in rates)
                print(f"{num_images} images at a time, {name}: {median:.1f} images/s")
            ratios = [each["openvino"] / each["onnx"] for each in rates]
            print(f"{num_images} images at a time, openvino / onnx: {spread(ratios, 2)}")


if __name__ == "__main__":
    main()
