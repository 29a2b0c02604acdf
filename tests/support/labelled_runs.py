"""A finished run with several labels an image, of a network that learns them in a few seconds."""

from pathlib import Path

from finetune.cli import run

CLASS = "labelled_files.LabelledFiles"
OPTIONS = [
    *("--data", CLASS, "--data.image_size", "28", "--data.batch_size", "16"),
    *("--data.num_workers", "0", "--data.val_fraction", "0.2", "--data.resize", "whole"),
    *("--model.backbone", "small_cnn", "--model.weights", "null", "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true", "--lr", "0.003", "--report", "false"),
]


def fit_labels(images: Path, out: Path, *options: str) -> Path:
    """Fit, test and return the folder of the run."""
    run(["fit", *OPTIONS, "--data.root", str(images), "--out", str(out), *options])
    return out / "fit" / "version_0"
