"""The results of a cross-validation: those of its folds together, over all images."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.runs.answers import Answers, LabelAnswers
from finetune.runs.bootstrap import bootstrap_interval
from finetune.runs.outcome import INTERVAL, mean_precision_interval
from finetune.runs.record import RunRecord
from finetune.system.files import replacing
from finetune.training.calibration import AnyCalibration
from finetune.training.logit_histogram import (
    average_precision,
    histogram,
    mean_average_precision,
)
from finetune.training.metrics import CalibrationError, class_metrics
from finetune.training.multilabel_calibration import (
    MultilabelCalibration,
    label_calibration_errors,
)
from finetune.training.multilabel_metrics import LabelCalibrationError, label_metrics

# Shapes: N images, K classes or labels.


def answers_of(run: RunRecord) -> Answers | LabelAnswers:
    """Return the predictions of a fold for the images that it tested.

    Raises:
        ValueError: It has none.
    """
    answers = run.answers or run.label_answers
    if not run.result or answers is None:
        raise ValueError(f"{run.path} has no result of its test, so the folds cannot be joined")
    return answers


def merged_result(runs: Sequence[RunRecord], joined: AnyCalibration) -> dict[str, Any]:
    """Return test.json of all folds: metrics over all images, and a row for each fold.

    The decisions and the calibrated probabilities are those of each fold, whose calibration and thresholds are from its
    own validation images. So no image is measured with a threshold that was chosen on it. The average precision of a
    label is that of the calibrated probabilities of all folds together.

    Args:
        runs: The runs of the folds, in order.
        joined: The calibration of the networks of all folds together.
    """
    results = [run.result for run in runs]
    if runs[0].label_answers is not None:
        values, sums = _label_metrics(runs)
    else:
        values, sums = _class_metrics(runs)
    values["loss"] = _loss(results)
    return {
        **{f"test/{name}": None if np.isnan(v) else float(v) for name, v in values.items()},
        "checkpoint": "checkpoints/best.ckpt",
        "folder": results[0].get("folder"),
        "image_folder": results[0].get("image_folder"),
        "class_names": results[0]["class_names"],
        **sums,
        "calibration": None,
        "joined_calibration": joined.as_plain(),
        "interpolation": None,
        "folds": [_row_of_fold(number, run) for number, run in enumerate(runs, 1)],
    }


def _class_metrics(runs: Sequence[RunRecord]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of images of one class each, and the confusion matrix behind them."""
    confusion = _sum_of(runs, "confusion_matrix")
    metrics = class_metrics(torch.from_numpy(confusion))
    values = {
        "accuracy": int(np.trace(confusion)) / int(confusion.sum()),
        "f1": float(metrics["f1"]),
        "calibration_error": _calibration_error(runs),
        **_by_class(runs, metrics, ("precision", "recall")),
    }
    return values, {"confusion_matrix": confusion.tolist()}


def _label_metrics(runs: Sequence[RunRecord]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of images of several labels, and the counts behind them."""
    answers = [run.label_answers for run in runs if run.label_answers is not None]
    probabilities = torch.from_numpy(np.concatenate([part.probabilities for part in answers]))
    labels = torch.from_numpy(np.concatenate([part.labels for part in answers]))
    is_right = np.concatenate([part.is_right for part in answers])
    counts = _sum_of(runs, "label_counts")
    metrics = label_metrics(torch.from_numpy(counts))
    histograms = histogram(probabilities.logit(), labels)
    metrics["average_precision"] = average_precision(histograms)
    mean = float(mean_average_precision(metrics["average_precision"]))
    error = LabelCalibrationError()
    error.update(probabilities, labels)
    values = {
        "mAP": mean,
        "exact_match": int(is_right.sum()) / len(is_right),
        **{name: float(metrics[name]) for name in ("f1_macro", "f1_micro", "hamming_distance")},
        "calibration_error": float(error.compute()),
        **_by_class(runs, metrics, ("precision", "recall", "average_precision")),
    }
    sums: dict[str, Any] = {
        "label_counts": counts.tolist(),
        "cooccurrence": _sum_of(runs, "cooccurrence").tolist(),
        "label_calibration": label_calibration_errors(
            histograms, MultilabelCalibration.unfitted(labels.shape[1])
        ),
    }
    if not np.isnan(mean):
        sums[INTERVAL] = list(bootstrap_interval(mean, labels.numpy(), probabilities.numpy()))
    return values, sums


def _sum_of(runs: Sequence[RunRecord], name: str) -> np.ndarray:
    """Return the sum of a table of test.json over all folds."""
    return np.sum([run.result[name] for run in runs], axis=0)


def _by_class(
    runs: Sequence[RunRecord], metrics: dict[str, torch.Tensor], names: Sequence[str]
) -> dict[str, float]:
    """Return the values of some metrics of each class (K,) under names such as `recall/cat`."""
    classes: list[str] = runs[0].result["class_names"]
    return {
        f"{name}/{c}": value
        for name in names
        for c, value in zip(classes, metrics[name].tolist(), strict=True)
    }


def _loss(results: Sequence[dict[str, Any]]) -> float:
    """Return the weighted mean loss over all images; NaN if the loss of a fold is unknown."""
    losses = [result["test/loss"] for result in results]
    weights = [result["loss_weight"] for result in results]
    if None in losses:
        return float("nan")
    return float(np.average(losses, weights=weights))


def _row_of_fold(number: int, run: RunRecord) -> dict[str, Any]:
    """Return the row of a fold in test.json."""
    answers = answers_of(run)
    row = {
        "fold": number,
        "run": f"fit/{run.path.name}",
        "num_images": len(answers.paths),
        "num_right": int(answers.is_right.sum()),
        "loss": run.result["test/loss"],
        "best_epoch": run.best[0] if run.best else None,
    }
    if run.label_answers is None:
        return row
    value = run.result["test/mAP"]
    bounds = None if value is None else list(mean_precision_interval(run.result))
    return {**row, "mAP": value, INTERVAL: bounds}


def _calibration_error(runs: Sequence[RunRecord]) -> float:
    """Return the calibration error of the most probable classes, which a threshold may overrule."""
    error = CalibrationError()
    for run in runs:
        answers = run.answers
        assert answers is not None
        confidence = answers.confidence
        is_right = answers.is_right
        if answers.probabilities is not None and answers.probabilities.shape[1] == 2:
            confidence = answers.probabilities.max(axis=1)
            is_right = answers.probabilities.argmax(axis=1) == answers.labels
        # The error depends on the confidence and on whether the prediction is right, not on the other classes.
        probabilities = np.stack([confidence, np.zeros_like(confidence)], axis=1)
        error.update(torch.from_numpy(probabilities), torch.from_numpy(~is_right).long())
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
    result = runs[0].result
    if "label_counts" in result:
        totals = _sum_of(runs, "label_counts")[:, 1].sum(axis=1).tolist()
    else:
        totals = _sum_of(runs, "confusion_matrix").sum(axis=1).tolist()
    num_images = sum(len(answers_of(run).paths) for run in runs)
    counts = dict(zip(result["class_names"], totals, strict=True))
    facts = {"counts": counts, "num_images": num_images}
    num = len(runs)
    doubts = dict.fromkeys(
        f"fold {number}: {doubt}"
        for number, run in enumerate(runs, 1)
        for doubt in run.about.get("doubts", ())
    )
    images = f"images: {about.get('root')}: {num_images:,}, each tested in one of {num} folds"
    return {
        **first,
        "root": about.get("root"),
        "splits": {
            "train": {
                "origin": f"each image in {num - 1} of {num} folds, less validation",
                **facts,
            },
            "test": {"origin": f"each image in one of {num} folds", **facts},
        },
        "lines": [
            images,
            *(line for line in about.get("lines", ()) if not line.startswith("images:")),
        ],
        "doubts": list(doubts),
        "first_look": about.get("first_look"),
        "licence_of_the_weights": about.get("licence_of_the_weights"),
    }
