"""A finished run with several labels an image, of a network that trains in a few seconds."""

import csv
from pathlib import Path

from labelled_files import LABELS

from finetune.cli import run

OPTIONS = [
    *("--data.image_size", "28", "--data.batch_size", "16", "--data.num_workers", "0"),
    *("--data.val_fraction", "0.2", "--data.resize", "whole", "--lr", "0.003"),
    *("--model.backbone", "small_cnn", "--model.weights", "null", "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true", "--report", "false"),
]


def write_table(images: Path) -> Path:
    """List the images of `labelled_files.draw_labelled` in a table next to their folder."""
    table = images.with_name("labels.csv")
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "labels", "split"])
        for split in ("train", "test"):
            for path in sorted((images / split).iterdir()):
                labels = [name for name in path.stem.split("+") if name in LABELS]
                writer.writerow([path, ";".join(labels), split])
    return table


def fit_labels(images: Path, out: Path, *options: str) -> Path:
    """Fit on a table of images, test, and return the folder of the run."""
    run(["fit", str(write_table(images)), *OPTIONS, "--out", str(out), *options])
    return out / "fit" / "version_0"
