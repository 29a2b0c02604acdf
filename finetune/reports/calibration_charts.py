"""Charts of a test: how well probabilities are calibrated, and what other thresholds would give."""

from collections.abc import Iterator

import numpy as np

from finetune.reports.charts import Bins, curves, reliability_chart
from finetune.reports.class_metrics import class_metrics
from finetune.reports.test_images import log_odds
from finetune.runs.predictions_table import Predictions
from finetune.runs.record import RunRecord
from finetune.runs.statistics import (
    coverage,
    num_reliability_bins,
    precision_recall,
    reliability,
    unscaled,
)

_MOST_CURVES = 8
_MOST_LABELS = 4
_PAIR_AXES = ("probability", "share present")
_BELOW = "On the dashed line, both are equal; below it, the network is overconfident."

# Shapes: N images, K classes or labels.


def calibration_charts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield charts of a test, each with a caption."""
    predictions = run.predictions
    if predictions is None or not predictions.paths:
        return
    before = _uncalibrated(run, predictions)
    yield _of_all(run, predictions, before)
    if predictions.is_single:
        yield from _coverage(predictions)
        if len(predictions.names) == 2:
            yield from _two_classes(predictions)
    else:
        yield from _of_each_label(run, predictions, before)
        yield from _precision_and_recall(run, predictions)


def _uncalibrated(run: RunRecord, predictions: Predictions) -> np.ndarray | None:
    """Return the probabilities (N, K) before the calibration; None if there was none, or too few are known."""
    calibration = run.result.get("calibration")
    is_measured = run.result.get("test/calibration_error_before_scaling") is not None
    if not calibration or not is_measured or not predictions.has_all_probabilities:
        return None
    scale = np.array(calibration["scale"])
    if predictions.is_single:
        return unscaled(predictions.probabilities, 1 / scale[0])
    logits = log_odds(predictions.probabilities) - np.array(calibration["bias"])
    return 1 / (1 + np.exp(-logits / scale))


def _of_all(run: RunRecord, predictions: Predictions, before: np.ndarray | None) -> tuple[str, str]:
    """Return the chart of all predicted classes, or of all pairs of an image and a label."""
    if predictions.is_single:
        decided = predictions.decided
        lowest = 1 / max(2, len(predictions.names))
        uncalibrated = None if before is None else before[decided]
        bins = _bins(predictions.confidence, uncalibrated, predictions.is_right, lowest)
        axes = ("confidence", "accuracy")
        what = "Accuracy by confidence"
    else:
        lowest = 0.0
        bins = _bins(predictions.probabilities, before, predictions.labels)
        axes = _PAIR_AXES
        what = "Share of the pairs of an image and a label that are present, by probability"
    text = f"{_errors(run)}{what}, with 95 % intervals. {_BELOW}"
    return reliability_chart(bins, text, axes, lowest), text


def _errors(run: RunRecord) -> str:
    """Return the calibration error, and that before calibration, in a sentence; "" if it is not known."""
    after = run.result.get("test/calibration_error")
    before = run.result.get("test/calibration_error_before_scaling")
    if after is None:
        return ""
    if before is None:
        return f"Calibration error {after:.3f}. "
    scale = (run.result.get("calibration") or {"scale": [1.0]})["scale"]
    by = (
        "calibration" if run.has_labels else f"temperature scaling (temperature {1 / scale[0]:.3f})"
    )
    return f"Calibration error {after:.3f}, {before:.3f} before {by}. "


def _bins(
    p: np.ndarray, before: np.ndarray | None, is_right: np.ndarray, lowest: float = 0.0
) -> Bins:
    """Return the bins of a reliability chart.

    Args:
        p: Calibrated probabilities, (N,) or (N, K).
        before: Those before calibration; None if there was none.
        is_right: Whether each prediction is right, or each label present; of the same shape.
        lowest: The lowest possible probability.
    """
    series = {"calibrated": p} if before is None else {"calibrated": p, "uncalibrated": before}
    num_bins = num_reliability_bins(is_right.size)
    return {
        name: reliability(values.ravel(), is_right.ravel(), num_bins, lowest)
        for name, values in series.items()
    }


def _of_each_label(
    run: RunRecord, predictions: Predictions, before: np.ndarray | None
) -> Iterator[tuple[str, str]]:
    """Yield charts of the labels whose calibration error is furthest above the one by chance."""
    errors = {
        row.name: row.calibration_error
        for row in class_metrics(run.result)
        if row.calibration_error is not None
    }
    chosen = sorted(errors, key=lambda name: errors[name][1] - errors[name][0])[:_MOST_LABELS]
    which = ""
    if len(chosen) < len(errors):
        which = f" One of the {len(chosen)} labels with the largest error beyond that by chance."
    for name in chosen:
        k = predictions.names.index(name)
        of_label = None if before is None else before[:, k]
        bins = _bins(predictions.probabilities[:, k], of_label, predictions.labels[:, k])
        error, by_chance = errors[name]
        text = f"{name}: calibration error {error:.3f}, by chance alone {by_chance:.3f}.{which}"
        yield reliability_chart(bins, text, _PAIR_AXES), text


def _coverage(predictions: Predictions) -> Iterator[tuple[str, str]]:
    share, accuracy = coverage(predictions.confidence, predictions.is_right)
    if len(share) > 1:
        text = "Accuracy on the most confident images, by the share of images that are classified."
        line = {"": (share.tolist(), accuracy.tolist())}
        yield curves(line, "share of images classified", "accuracy", text), text


def _two_classes(predictions: Predictions) -> Iterator[tuple[str, str]]:
    name = predictions.names[1]
    thresholds, precision, recall = precision_recall(
        predictions.probabilities[:, 1], predictions.labels[:, 1]
    )
    text = f"Precision and recall of {name} as its threshold falls."
    line = {"": (recall.tolist(), precision.tolist())}
    yield curves(line, f"recall of {name}", "precision", text), text
    lines = {
        "precision": (thresholds.tolist(), precision.tolist()),
        "recall": (thresholds.tolist(), recall.tolist()),
    }
    text = f"Precision and recall of {name} by its threshold; the default is 0.5."
    yield curves(lines, f"threshold of {name}", "", text), text


def _precision_and_recall(run: RunRecord, predictions: Predictions) -> Iterator[tuple[str, str]]:
    rows = [row for row in class_metrics(run.result) if row.average_precision]
    rows.sort(key=lambda row: row.average_precision or (0.0, 0.0, 0.0))
    lines = {}
    for row in rows[:_MOST_CURVES]:
        k = predictions.names.index(row.name)
        if predictions.labels[:, k].any():
            _, precision, recall = precision_recall(
                predictions.probabilities[:, k], predictions.labels[:, k]
            )
            lines[row.name] = (recall.tolist(), precision.tolist())
    if lines:
        which = f"the {len(lines)} labels with the lowest average precision"
        of = "each label" if len(lines) == len(predictions.names) else which
        text = f"Precision and recall of {of} as its threshold falls."
        yield curves(lines, "recall", "precision", text), text
