"""Charts of a test: how well probabilities are calibrated, and what other thresholds would give."""

import math
from collections.abc import Iterator

import numpy as np

from finetune.reports.charts import curves, reliability_chart
from finetune.reports.class_metrics import class_metrics
from finetune.runs.predictions_table import Predictions
from finetune.runs.record import RunRecord

_MOST_CURVES = 8

# Shapes: N images, K classes or labels, T thresholds.


def calibration_charts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield charts of a test, each with a caption."""
    predictions = run.predictions
    if predictions is None or not predictions.paths:
        return
    yield _reliability(run, predictions)
    if not predictions.is_single:
        yield from _precision_and_recall(run, predictions)
        return
    share, accuracy = accepted_shares(predictions.confidence, predictions.is_right)
    if len(share) > 1:
        text = "Accuracy on the most confident images, by the share of images that are classified."
        line = {"": (share.tolist(), accuracy.tolist())}
        yield curves(line, "share of images classified", "accuracy", text), text
    if len(predictions.names) == 2:
        name = predictions.names[1]
        curve = precision_recall(predictions.probabilities[:, 1], predictions.labels[:, 1])
        thresholds, precision, recall = (values.tolist() for values in curve)
        text = f"Precision and recall of {name} by its threshold; the default is 0.5."
        lines = {"precision": (thresholds, precision), "recall": (thresholds, recall)}
        yield curves(lines, f"threshold of {name}", "", text), text


def _reliability(run: RunRecord, predictions: Predictions) -> tuple[str, str]:
    """Return the reliability chart of all predicted classes, or of all pairs of an image and a label."""
    if predictions.is_single:
        is_right = predictions.is_right
        values = predictions.probabilities[predictions.decided]
        lowest = 1 / max(2, len(predictions.names))
        axes = ("confidence", "accuracy")
        what = "Accuracy by confidence"
    else:
        is_right = predictions.labels.ravel()
        values = predictions.probabilities.ravel()
        lowest = 0.0
        axes = ("probability", "share present")
        what = "Share of the pairs of an image and a label that are present, by probability"
    bins = reliability(values, is_right, num_reliability_bins(is_right.size), lowest)
    line = "On the dashed line, both are equal; below it, the network is overconfident."
    text = f"{_errors(run)}{what}, with 95 % intervals. {line}"
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
    temperature = f"temperature scaling (temperature {1 / scale[0]:.3f})"
    by = "calibration" if run.has_labels else temperature
    return f"Calibration error {after:.3f}, {before:.3f} before {by}. "


def _precision_and_recall(run: RunRecord, predictions: Predictions) -> Iterator[tuple[str, str]]:
    """Yield a chart of the labels with the lowest average precision."""
    averages = {
        row.name: row.average_precision[0]
        for row in class_metrics(run.result)
        if row.average_precision
    }
    lines = {}
    for name in sorted(averages, key=lambda name: averages[name])[:_MOST_CURVES]:
        k = predictions.names.index(name)
        _, precision, recall = precision_recall(
            predictions.probabilities[:, k], predictions.labels[:, k]
        )
        lines[name] = (recall.tolist(), precision.tolist())
    if lines:
        which = f"the {len(lines)} labels with the lowest average precision"
        of = "each label" if len(lines) == len(predictions.names) else which
        text = f"Precision and recall of {of} as its threshold falls."
        yield curves(lines, "recall", "precision", text), text


def reliability(
    confidence: np.ndarray, is_right: np.ndarray, num_bins: int = 10, lowest: float = 0.0
) -> list[tuple[float, float, int]]:
    """Return mean confidence, accuracy and number of images of each bin of confidence that is not empty.

    Args:
        confidence: Probability of the predicted class, (N,).
        is_right: Whether the prediction is correct, (N,) bool.
        num_bins: Equal parts of [lowest, 1].
        lowest: The lowest possible confidence: 1 / K for K classes.
    """
    position = (confidence - lowest) / (1 - lowest)
    bins = np.clip((position * num_bins).astype(int), 0, num_bins - 1)
    of_bins = [(confidence[bins == b], is_right[bins == b]) for b in range(num_bins)]
    return [(float(c.mean()), float(r.mean()), len(c)) for c, r in of_bins if len(c)]


def num_reliability_bins(num: int) -> int:
    """Return how many bins of confidence to draw for `num` images: 3 up to 36 images, 10 from 400 on.

    With more bins, a bin of a small test would have only two or three images.
    """
    return min(10, max(3, round(math.sqrt(num) / 2)))


def precision_recall(
    score: np.ndarray, is_positive: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return thresholds, precision and recall, (T,) each, from the highest threshold down.

    An image is predicted as positive if its score is at least the threshold.

    Args:
        score: Probability of the positive class, (N,).
        is_positive: Whether the image is of that class, (N,) bool.
    """
    order = np.argsort(-score, kind="stable")
    score = score[order]
    hits = np.cumsum(is_positive[order])
    # images with equal scores have the same prediction, so only the last of them counts
    last = np.append(score[1:] != score[:-1], True)
    num_predicted = np.arange(1, len(score) + 1)
    return score[last], (hits / num_predicted)[last], (hits / max(1, int(is_positive.sum())))[last]


def accepted_shares(confidence: np.ndarray, is_right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return shares of the images, the most confident first, and the accuracy on each share, (T,) each."""
    order = np.argsort(-confidence, kind="stable")
    confidence = confidence[order]
    hits = np.cumsum(is_right[order])
    last = np.append(confidence[1:] != confidence[:-1], True)
    num_accepted = np.arange(1, len(confidence) + 1)
    return (num_accepted / len(confidence))[last], (hits / num_accepted)[last]
