"""The results of a cross-validation: those of its folds together, over all images."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.runs.record import RunRecord
from finetune.system.files import replacing
from finetune.training.metrics import CalibrationError, class_metrics


def merged_result(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return test.json of all folds: metrics over all images, and a row for each fold.

    The loss is the mean over all images of the folds' losses. All other metrics are computed from the predictions.

    Args:
        runs: The runs of the folds, in order.
    """
    results = [run.result for run in runs]
    names: list[str] = results[0]["class_names"]
    confusion = np.sum([result["confusion_matrix"] for result in results], axis=0)
    rows = [_fold(number, run) for number, run in enumerate(runs, 1)]
    num_images = int(confusion.sum())
    metrics = class_metrics(torch.from_numpy(confusion))
    values = {
        "test/accuracy": int(np.trace(confusion)) / num_images,
        "test/loss": sum(row["loss"] * row["num_images"] for row in rows) / num_images,
        "test/f1": float(metrics["f1"]),
        "test/calibration_error": _calibration_error(runs),
    }
    for what in ("precision", "recall"):
        for name, value in zip(names, metrics[what].tolist(), strict=True):
            values[f"test/{what}/{name}"] = value
    return {
        **{name: None if np.isnan(value) else value for name, value in values.items()},
        "checkpoint": "checkpoints/best.ckpt",
        "folder": results[0].get("folder"),
        "class_names": names,
        "confusion_matrix": confusion.tolist(),
        "calibration": None,
        "interpolation": None,
        "folds": rows,
    }


def _fold(number: int, run: RunRecord) -> dict[str, Any]:
    confusion = np.array(run.result["confusion_matrix"])
    return {
        "fold": number,
        "run": f"fit/{run.path.name}",
        "num_images": int(confusion.sum()),
        "num_right": int(np.trace(confusion)),
        "loss": run.result["test/loss"],
        "best_epoch": run.best[0] if run.best else None,
    }


def _calibration_error(runs: Sequence[RunRecord]) -> float:
    error = CalibrationError()
    for run in runs:
        assert run.answers is not None
        confidence = torch.from_numpy(run.answers.confidence)
        # The error depends on the confidence and on whether the prediction is right, not on the other classes.
        is_wrong = torch.from_numpy(~run.answers.is_right).long()
        error.update(torch.stack([confidence, torch.zeros_like(confidence)], dim=1), is_wrong)
    return float(error.compute())


def write_predictions(runs: Sequence[Path], target: Path) -> None:
    """Write the predictions of all folds into one file, with a column `fold`.

    Args:
        runs: The folders of the folds, in order.
        target: The file to write.

    Raises:
        ValueError: An image was tested in more than one fold.
    """
    tested: set[str] = set()
    own_bytes = "surrogateescape"  # of file names that are not UTF-8
    with (
        replacing(target) as temporary,
        open(temporary, "w", newline="", encoding="utf-8", errors=own_bytes) as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        for number, run in enumerate(runs, 1):
            rows = _rows(run / "test_predictions.csv")
            header = next(rows)
            if number == 1:
                writer.writerow([*header, "fold"])
            for row in rows:
                path = row[header.index("path")]
                if path in tested:
                    raise ValueError(f"{path} was tested in more than one fold: begin a new run")
                tested.add(path)
                writer.writerow([*row, number])


def _rows(path: Path) -> Iterator[list[str]]:
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        yield from csv.reader(file)


def merged_about(runs: Sequence[RunRecord], first: dict[str, Any]) -> dict[str, Any]:
    """Return about.json of all folds.

    Args:
        runs: The runs of the folds, in order.
        first: What is known from the beginning: the command and the time.
    """
    about = runs[0].about
    names: list[str] = runs[0].result["class_names"]
    totals = np.sum([run.result["confusion_matrix"] for run in runs], axis=(0, 2)).tolist()
    counts = dict(zip(names, totals, strict=True))
    num = len(runs)
    doubts = dict.fromkeys(
        f"fold {number}: {doubt}"
        for number, run in enumerate(runs, 1)
        for doubt in run.about.get("doubts", ())
    )
    num_images = sum(totals)
    images = f"images: {about.get('root')}: {num_images:,}, each tested in one of {num} folds"
    return {
        **first,
        "root": about.get("root"),
        "splits": {
            "train": {
                "origin": f"each image in {num - 1} of {num} folds, less validation",
                "counts": counts,
            },
            "test": {"origin": f"each image in one of {num} folds", "counts": counts},
        },
        "lines": [
            images,
            *(line for line in about.get("lines", ()) if not line.startswith("images:")),
        ],
        "doubts": list(doubts),
        "first_look": about.get("first_look"),
        "licence_of_the_weights": about.get("licence_of_the_weights"),
    }
