"""The command of each tool with its own recipe, and its accuracy on the test images."""

import csv
import json
import shlex
from pathlib import Path

import numpy as np

from benchmarks.common.records import PROGRAM
from benchmarks.peers import measure, tools
from benchmarks.quality.plan import Run, number

# The default of each tool; the plain script's is that of benchmarks/peers.
BATCH_SIZES = {"plain": 64, "timm": 128, "fastai": 64, "ultralytics": 16, "transformers": 8}
# Workers where there is an option, two for two cores. timm: a tenth of the rate from scratch, as its author advises for
# a new head (huggingface/pytorch-image-models#25), and a warm-up that is shorter than the shortest run.
OPTIONS = {
    "plain": "--seed {seed}",
    "timm": "--lr-base 0.01 --warmup-epochs 1 --workers 2 --seed {seed}",
    "fastai": "--seed {seed}",
    "ultralytics": "workers=2 seed={seed}",
    "transformers": "--workers 2 --seed {seed}",
}
CALIBRATION = ("calibration_error_before_scaling", "calibration_error")


def command(run: Run, place: tools.Place) -> list[str]:
    """Return the command of a run; of a peer with the tool's own batch size, rate, optimizer and augmentation."""
    if run.tool != "finetune":
        options = OPTIONS[run.tool].format(seed=run.seed).split()
        return tools.fit_peer(
            run.tool, int(number(run.setting)), BATCH_SIZES[run.tool], options, place
        )
    words = [PROGRAM, "fit", str(place.data), "--size", str(tools.IMAGE_SIZE)]
    if run.setting != "default":
        words += [f"--{run.setting.partition('_')[0]}", f"{number(run.setting):g}"]
    words += ["--seed", str(run.seed)]
    words += ["--weights", str(place.weights), "--out", str(place.out)]
    return words if place.is_resnet else [*words, "--backbone", place.backbone]


def accuracy(tool: str, place: tools.Place, output: str) -> float:
    """Return the accuracy on the test images: ours of the checkpoint that is kept, a peer's of its last epoch."""
    if tool == "finetune":
        return json.loads((place.out / "fit/version_0/test.json").read_text("utf-8"))[
            "test/accuracy"
        ]
    return tools.accuracy(tool, place.out, output)


def calibration(out: Path) -> dict[str, float]:
    """Return the calibration error on the test images, and what would be measured if the probabilities were true.

    So few images in 15 bins never hit their probabilities exactly.
    """
    test = json.loads((out / "fit/version_0/test.json").read_text("utf-8"))
    found = {name: round(test[f"test/{name}"], 4) for name in CALIBRATION if f"test/{name}" in test}
    with open(out / "fit/version_0/test_predictions.csv", encoding="utf-8", newline="") as file:
        confidence = np.array([float(row["probability"]) for row in csv.DictReader(file)])
    return found | {"calibration_error_if_true": round(expected_error(confidence), 4)}


def expected_error(confidence: np.ndarray, draws: int = 1000) -> float:
    """Return the mean calibration error of images that are right as often as their confidence (N,) says."""
    bins = np.minimum((confidence * 15).astype(int), 14)
    is_right = np.random.default_rng(0).random((draws, len(confidence))) < confidence
    gaps = [np.abs((is_right - confidence)[:, bins == b].sum(1)) for b in range(15)]
    return float(np.mean(sum(gaps)) / len(confidence))


def train(run: Run, place: tools.Place) -> dict:
    """Return what a run gave: accuracy, of how many images that is, and the seconds of the whole command."""
    words = command(run, place)
    done = measure.run(words, tools.variables(place), place.out / "clock.txt")
    split = "test" if run.tool == "finetune" else "val"
    return {
        "accuracy": round(accuracy(run.tool, place, done["output"]), 5),
        "num_test": sum(1 for _ in place.data.glob(f"{split}/*/*")),
        **(calibration(place.out) if run.tool == "finetune" else {}),
        "seconds": round(done["seconds"], 2),
        "cpu_seconds": round(done["cpu_seconds"], 2),
        "command": shlex.join(words),
    }
