"""The parts of report.html for images with several labels: labels that occur together, mistakes of each label."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.runs.answers import LabelAnswers
from finetune.runs.charts import curves, reliability_chart, reliability_panels
from finetune.runs.highlights import (
    NUM_SHOWN,
    ImageViewer,
    ReportImage,
    max_per_cell,
    report_label_images,
)
from finetune.runs.outcome import LabelRow, label_rows
from finetune.runs.record import RunRecord
from finetune.runs.statistics import num_reliability_bins, precision_recall, reliability

MAX_MATRIX = (
    25  # classes or labels: a larger matrix cannot be read; a list of its largest cells can
)
NUM_PAIRS = 40  # largest cells, and sections of mistakes, instead of a larger matrix
_MOST_CURVES = 8
_MOST_PANELS = 4
_TINY = 1e-12
_RELIABILITY_AXES = ("probability", "share present")

# Shapes: N images, K labels.


@dataclass(frozen=True)
class LabelMetrics:
    """A row of the table of labels.

    Attributes:
        row: Metrics with their intervals.
        threshold: The probability from which the label is predicted.
        f1: None if it is undefined.
        num_missed: Number of images that have the label and for which it is not predicted.
        num_false: Number of images for which it is wrongly predicted.
        calibration_error: The calibration error, and an estimate of the one by chance alone; None if it is unknown.
    """

    row: LabelRow
    threshold: float
    f1: float | None
    num_missed: int
    num_false: int
    calibration_error: tuple[float, float] | None


@dataclass(frozen=True)
class Mistakes:
    """The images with one kind of mistake in one label.

    Attributes:
        id: Id of the section in HTML.
        heading: The label and the kind of mistake.
        order: Which images come first.
        count: Number of images.
        images: The first of them.
    """

    id: str
    heading: str
    order: str
    count: int
    images: list[ReportImage]


@dataclass(frozen=True)
class LabelSections:
    """The parts of a report.

    Attributes:
        metrics: A row for each label.
        together: The number of images with two labels and the share of those with the label of the row, (K, K); None
            for many labels.
        pairs: The most frequent pairs of labels and their numbers, if there are many labels.
        mistakes: The mistakes of each label; if there are many labels the most frequent ones.
    """

    metrics: list[LabelMetrics]
    together: list[list[tuple[int, float]]] | None
    pairs: list[tuple[str, str, int]]
    mistakes: list[Mistakes]


def label_sections(run: RunRecord, viewer: ImageViewer | None) -> LabelSections | None:
    """Return the parts for the test of a run; None if it was not tested."""
    if not run.result.get("label_counts"):
        return None
    counts = run.result["cooccurrence"]
    is_small = len(counts) <= MAX_MATRIX
    return LabelSections(
        metrics=list(_metrics(run)),
        together=[_with_shares(row, i) for i, row in enumerate(counts)] if is_small else None,
        pairs=[] if is_small else _frequent_pairs(run.result["class_names"], np.array(counts)),
        mistakes=list(_mistakes(run.label_answers, viewer)) if run.label_answers else [],
    )


def _metrics(run: RunRecord) -> Iterator[LabelMetrics]:
    names = run.result["class_names"]
    thresholds = thresholds_of(run)
    errors = dict(zip(names, _calibration_errors(run), strict=False))
    for row, threshold, counts in zip(
        label_rows(run.result), thresholds, run.result["label_counts"], strict=True
    ):
        (_, num_false), (num_missed, hits) = counts
        num = 2 * hits + num_false + num_missed
        yield LabelMetrics(
            row=row,
            threshold=threshold,
            f1=2 * hits / num if num else None,
            num_missed=num_missed,
            num_false=num_false,
            calibration_error=errors.get(row.name),
        )


def _calibration_errors(run: RunRecord) -> list[tuple[float, float]]:
    """Return the calibration error of each label, and an estimate of that by chance; none if they are unknown."""
    errors = run.result.get("label_calibration", {})
    return list(zip(errors.get("error", ()), errors.get("error_by_chance", ()), strict=False))


def thresholds_of(run: RunRecord) -> list[float]:
    """Return the threshold of each label in a test; with folds those of all folds together."""
    calibration = run.result.get("calibration") or run.result.get("joined_calibration") or {}
    return calibration.get("thresholds") or [0.5] * len(run.result["class_names"])


def _with_shares(row: Sequence[int], i: int) -> list[tuple[int, float]]:
    return [(count, count / max(1, row[i])) for count in row]


def _frequent_pairs(names: Sequence[str], counts: np.ndarray) -> list[tuple[str, str, int]]:
    first, second = np.triu_indices(len(names), 1)
    of_pairs = counts[first, second]
    order = np.argsort(-of_pairs, kind="stable")[:NUM_PAIRS]
    return [(names[first[i]], names[second[i]], int(of_pairs[i])) for i in order if of_pairs[i] > 0]


def _mistakes(answers: LabelAnswers, viewer: ImageViewer | None) -> Iterator[Mistakes]:
    rows = []
    for k, name in enumerate(answers.class_names):
        missed = answers.missed(k)
        false = answers.false(k)
        rows.append((f"missed-{k}", f"{name}, missed", "The least probable first", k, missed))
        rows.append(
            (f"false-{k}", f"{name}, falsely predicted", "The most probable first", k, false)
        )
    if len(answers.class_names) > MAX_MATRIX:
        rows = sorted(rows, key=lambda row: -len(row[-1]))[:NUM_PAIRS]
    most = max_per_cell([len(images) for *_, images in rows])
    for key, heading, order, k, images in rows:
        if len(images):
            chosen = [(int(i), k) for i in images[:most]]
            reported = (
                report_label_images(answers, chosen, viewer, has_overlay=False) if viewer else []
            )
            yield Mistakes(key, heading, order, len(images), reported)


def label_highlights(run: RunRecord, viewer: ImageViewer) -> Iterator[dict[str, Any]]:
    """Yield a heading, a sentence, and images with a label each, the most informative first, of each kind."""
    answers = run.label_answers
    assert answers is not None
    thresholds = np.array(thresholds_of(run))
    p = answers.probabilities
    distance = np.abs(_logit(p) - _logit(thresholds))
    false = answers.predicted & ~answers.labels
    missed = answers.labels & ~answers.predicted
    rows = [
        (
            "Most confident false predictions",
            "Predicted with a high probability, but the image does not have the label. Look here first for labels that "
            "were forgotten.",
            _first_pairs(-p, false),
            int(false.sum()),
        ),
        (
            "Most confident misses",
            "The image has the label, but its probability is low. Look here for wrong labels and for kinds of images "
            "that training lacks.",
            _first_pairs(p, missed),
            int(missed.sum()),
        ),
        (
            "Closest to the threshold",
            "The label is predicted or not by a small margin. More training images like these help most.",
            _first_pairs(distance, np.ones_like(false)),
            p.size,
        ),
    ]
    for heading, sentence, pairs, count in rows:
        reported = report_label_images(answers, pairs, viewer, has_overlay=True)
        yield {"heading": heading, "sentence": sentence, "images": reported, "count": count}


def _first_pairs(value: np.ndarray, is_chosen: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs (image, label) with the lowest values, each image once.

    Args:
        value: (N, K).
        is_chosen: Which pairs to consider, (N, K).
    """
    images, labels = np.nonzero(is_chosen)
    order = np.argsort(value[images, labels], kind="stable")
    pairs: dict[int, int] = {}
    for i in order:
        pairs.setdefault(int(images[i]), int(labels[i]))
        if len(pairs) == NUM_SHOWN:
            break
    return list(pairs.items())


def label_charts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield charts of calibration and of precision and recall, each with a caption."""
    answers = run.label_answers
    if answers is None or not answers.paths:
        return
    p = answers.probabilities
    before = _uncalibrated(run, p)
    bins = _reliability_of(p, before, answers.labels)
    errors = [run.result.get(f"test/calibration_error{name}") for name in ("", "_before_scaling")]
    text = "" if errors[0] is None else f"Calibration error {errors[0]:.3f}"
    if errors[1] is not None and before is not None:
        text += f", {errors[1]:.3f} before calibration"
    text += (
        ". Share of the pairs of an image and a label that are present, by probability, with 95 % intervals. On the "
        "dashed line, both are equal; below it, the network is overconfident."
    )
    text = text.lstrip(". ")
    yield reliability_chart(bins, text, 0.0, _RELIABILITY_AXES), text
    yield from _reliability_of_labels(run, answers, before)
    yield from _precision_and_recall(run, answers)


def _uncalibrated(run: RunRecord, probabilities: np.ndarray) -> np.ndarray | None:
    """Return the probabilities (N, K) before scale and bias were applied; None if there was no calibration."""
    calibration = run.result.get("calibration")
    if not calibration:
        return None
    logits = _logit(probabilities) - np.array(calibration["bias"])
    return 1 / (1 + np.exp(-logits / np.array(calibration["scale"])))


def _reliability_of(
    probabilities: np.ndarray, before: np.ndarray | None, labels: np.ndarray
) -> dict[str, list[tuple[float, float, int]]]:
    """Return the bins of a reliability chart for all pairs of an image and a label.

    Args:
        probabilities: Calibrated probabilities, (N,) or (N, K).
        before: Those before calibration; None if there was none.
        labels: Whether each label is present, of the same shape.
    """
    num_bins = num_reliability_bins(labels.size)
    is_present = labels.ravel()
    bins = {"calibrated": reliability(probabilities.ravel(), is_present, num_bins, 0.0)}
    if before is not None:
        bins["uncalibrated"] = reliability(before.ravel(), is_present, num_bins, 0.0)
    return bins


def _reliability_of_labels(
    run: RunRecord, answers: LabelAnswers, before: np.ndarray | None
) -> Iterator[tuple[str, str]]:
    """Yield a chart of the labels whose calibration error is furthest above the one by chance."""
    errors = _calibration_errors(run)
    order = sorted(range(len(errors)), key=lambda k: errors[k][1] - errors[k][0])
    chosen = order[:_MOST_PANELS]
    panels = {}
    for k in chosen:
        panels[answers.class_names[k]] = _reliability_of(
            answers.probabilities[:, k],
            None if before is None else before[:, k],
            answers.labels[:, k],
        )
    if panels:
        named = ", ".join(f"{answers.class_names[k]} {errors[k][0]:.3f}" for k in chosen)
        which = (
            f"The {len(chosen)} labels whose calibration error is furthest above the one by chance"
        )
        if len(chosen) == len(errors):
            which = "Each label with its calibration error"
        text = f"{which}: {named}. Axes and intervals are those of the chart of all pairs."
        yield reliability_panels(panels, text, _RELIABILITY_AXES), text


def _precision_and_recall(run: RunRecord, answers: LabelAnswers) -> Iterator[tuple[str, str]]:
    rows = [row for row in label_rows(run.result) if row.average_precision]
    rows.sort(key=lambda row: row.average_precision or (0.0, 0.0, 0.0))
    lines = {}
    for row in rows[:_MOST_CURVES]:
        k = answers.class_names.index(row.name)
        if answers.labels[:, k].any():
            _, precision, recall = precision_recall(
                answers.probabilities[:, k], answers.labels[:, k]
            )
            lines[row.name] = (recall.tolist(), precision.tolist())
    if lines:
        which = f"the {len(lines)} labels with the lowest average precision"
        of = "each label" if len(lines) == len(answers.class_names) else which
        text = f"Precision and recall of {of} as its threshold falls."
        yield curves(lines, "recall", "precision", text), text


def _logit(p: np.ndarray) -> np.ndarray:
    """Return the log odds of probabilities. 0 and 1 give large finite ones."""
    p = p.clip(_TINY, 1 - _TINY)
    return np.log(p / (1 - p))
