"""What is measured of a split, from the outputs for its images. One process computes it, in float64.

Metrics have the definitions of scikit-learn, with two exceptions: a class or label without images has no recall and no
part in a mean, and one that is never predicted has no precision. There scikit-learn and torchmetrics count 0.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import multilabel_confusion_matrix

from finetune.features.average_precision import (
    average_precision,
    mean_average_precision,
    sampled_average_precision,
)
from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.headline import INTERVAL
from finetune.runs.intervals import interval, percent, wilson
from finetune.training.calibration import Calibration
from finetune.training.groups import Groups
from finetune.training.loss import Target
from finetune.training.outputs import Outputs

# Shapes: N images, K classes or labels.

# Of the probability, for calibration errors. As in torchmetrics they are [0, 1/15), …, [14/15, 1), and one for 1.
_EDGES = torch.linspace(0, 1, 16).numpy()
_CHUNK = 2**22  # logits that are converted to float64 at once: 32 MB
# of the bootstrap
_MAX_SAMPLES = 200
_MIN_SAMPLES = 30
# Of all samples together, about a second. The least number of samples may have more: 60 million take three seconds.
_MAX_SCORES = 20_000_000
_EDGE = 1e-3  # the corrected value stays this far from 0 and 1

Array = np.ndarray
Measured = tuple[dict[str, float], dict[str, Any]]


def measure(
    outputs: Outputs,
    task: Any,
    calibration: Calibration,
    class_weight: Tensor,
    has_interval: bool,
    has_pairs: bool = True,
) -> Measured:
    """Return the metrics of a split by name, and the sums and tables behind them.

    The loss and average precisions are those of the uncalibrated logits. Predicted classes or labels and
    `calibration_error` are those of the calibration, and `calibration_error_before_scaling` is that of the uncalibrated
    probabilities. `loss_weight` is the sum of the weights of the images in the loss. The other tables are those of
    `measure_classes` or `measure_labels`.

    Args:
        outputs: The outputs for the images, of which there is at least one.
        task: The `Task`.
        calibration: How logits become probabilities and decisions.
        class_weight: The weights of the loss, (K,).
        has_interval: Of several labels, whether to compute the interval of the mean average precision, in seconds.
        has_pairs: Whether to return `confusion_matrix` or `cooccurrence`, (K, K).
    """
    loss = 0.0
    weight = 0.0
    for logits, labels in _chunks(outputs):
        target = Target(labels)  # each image counts once
        loss += float(task.loss_sum(logits, target, class_weight.cpu().double()))
        weight += float(target.weight(class_weight.cpu().double()))
    if task.label_kind == "single":
        values, tables = _of_classes(outputs, task.class_names, calibration, has_pairs)
    else:
        values, tables = _of_labels(outputs, task.class_names, calibration, has_interval, has_pairs)
    return {"loss": loss / weight, **values}, {**tables, "loss_weight": weight}


def measure_groups(
    groups: Groups, task: Any, calibration: Calibration, class_weight: Tensor, split: str
) -> dict[str, Any]:
    """Return the metrics and tables of groups, measured as images, and how many are left out, for test.json."""
    left_out = {
        "num_mixed": groups.num_mixed,
        "num_unread": len(groups.outputs.bad) - groups.num_mixed,
    }
    if not len(groups.outputs.index):
        return left_out
    values, tables = measure(groups.outputs, task, calibration, class_weight, split == "test")
    metrics = {f"{split}/{name}": None if math.isnan(v) else v for name, v in values.items()}
    return {**metrics, **tables, **left_out}


def _chunks(outputs: Outputs) -> zip:
    """Return the logits in float64 and the labels of some images at a time."""
    num = max(1, _CHUNK // outputs.logits.shape[1])
    logits = (part.double() for part in outputs.logits.split(num))
    return zip(logits, outputs.labels.split(num), strict=True)


def _of_classes(
    outputs: Outputs, names: Sequence[str], calibration: Calibration, has_pairs: bool
) -> Measured:
    before = Calibration.unfitted("single", len(names))
    columns = []
    for logits, _ in _chunks(outputs):
        probabilities = calibration.probabilities(logits)
        both = (probabilities, before.probabilities(logits))
        of_each = [value.numpy() for each in both for value in each.max(dim=1)]
        columns.append([calibration.decide(probabilities).numpy(), *of_each])
    predicted, confidence, top, raw, raw_top = map(np.concatenate, zip(*columns, strict=True))
    labels = outputs.labels.numpy()
    values, tables = measure_classes(labels, predicted, names, has_pairs)
    values["calibration_error"] = calibration_error(confidence, top == labels)
    if calibration.num_images:
        values["calibration_error_before_scaling"] = calibration_error(raw, raw_top == labels)
    return values, tables


def measure_classes(
    labels: Array, predicted: Array, names: Sequence[str], has_pairs: bool = True
) -> Measured:
    """Return the metrics of images of one class each, and `confusion_matrix` (K, K), whose rows are the true classes.

    The macro F1 is the mean over the classes with images.

    Args:
        labels: The class of each image, (N,).
        predicted: The predicted class, (N,).
        names: The classes.
        has_pairs: Whether to return the confusion matrix.
    """
    num = len(names)
    right = np.bincount(labels[predicted == labels], minlength=num)
    num_of_class = np.bincount(labels, minlength=num)
    num_predicted = np.bincount(predicted, minlength=num)
    f1 = _share(2 * right, num_of_class + num_predicted)
    values = {
        "accuracy": float(right.sum() / num_of_class.sum()),
        "f1": float(f1[num_of_class > 0].mean()),
        **_by_name("precision", _share(right, num_predicted), names),
        **_by_name("recall", _share(right, num_of_class), names),
    }
    if not has_pairs:
        return values, {}
    of_pairs = np.bincount(labels * num + predicted, minlength=num**2)
    return values, {"confusion_matrix": of_pairs.reshape(num, num).tolist()}


def _of_labels(
    outputs: Outputs,
    names: Sequence[str],
    calibration: Calibration,
    has_interval: bool,
    has_pairs: bool,
) -> Measured:
    probabilities = calibration.probabilities(outputs.logits)
    decided = calibration.decide(probabilities).numpy()
    labels = outputs.labels.numpy() > 0
    scores = outputs.logits.double().numpy()
    values, tables = measure_labels(
        scores, probabilities.numpy(), labels, decided, names, has_interval, has_pairs
    )
    if calibration.num_images:
        before = Calibration.unfitted("several", len(names)).probabilities(outputs.logits).numpy()
        name = "calibration_error_before_scaling"
        values[name] = calibration_error(before.ravel(), labels.ravel())
    return values, tables


def measure_labels(
    scores: Array,
    probabilities: Array,
    labels: Array,
    decided: Array,
    names: Sequence[str],
    has_interval: bool,
    has_pairs: bool = True,
) -> Measured:
    """Return the metrics of images of several labels, and the tables behind them.

    `label_counts` (K, 2, 2) has for each label the true negatives, false positives, false negatives and true positives.
    `cooccurrence` (K, K) has the images with two labels.

    Args:
        scores: By which the average precision orders the images, (N, K).
        probabilities: (N, K).
        labels: Whether each image has each label, (N, K) bool.
        decided: Whether each label is predicted, (N, K) bool.
        names: The labels.
        has_interval: Whether to compute the interval of the mean average precision.
        has_pairs: Whether to return `cooccurrence`.
    """
    of_images = torch.from_numpy(decided).long(), torch.from_numpy(labels).long()
    counts = multilabel_confusion_matrix(*of_images, len(names)).numpy()
    (_, false_positives), (false_negatives, hits) = counts.transpose(1, 2, 0)
    errors = false_positives + false_negatives
    has_images = labels.any(axis=0)
    f1 = _share(2 * hits, 2 * hits + errors)[has_images]
    of_labels = average_precision(scores, labels)
    values = {
        "mAP": mean_average_precision(of_labels),
        "exact_match": float((labels == decided).all(axis=1).mean()),
        "f1_macro": float(f1.mean()) if len(f1) else math.nan,
        "f1_micro": float(_share(2 * hits.sum(), (2 * hits + errors).sum())),
        "hamming_distance": float(errors.sum() / labels.size),
        "calibration_error": calibration_error(probabilities.ravel(), labels.ravel()),
        **_by_name("precision", _share(hits, hits + false_positives), names),
        **_by_name("recall", _share(hits, hits + false_negatives), names),
        **_by_name("average_precision", of_labels, names),
    }
    tables: dict[str, Any] = {"label_counts": counts.tolist()}
    if has_pairs:
        # in float64, whose products of matrices are fast; counts are exact up to 2 ** 53
        together = labels.T.astype(np.float64) @ labels.astype(np.float64)
        tables["cooccurrence"] = together.astype(np.int64).tolist()
    if has_interval and not math.isnan(values["mAP"]):
        tables[INTERVAL] = list(bootstrap_interval(values["mAP"], labels, scores))
    return values, tables


def measure_sets(outputs: Outputs, calibration: Calibration, coverage: float) -> dict[str, Any]:
    """Return as plain values how prediction sets cover the classes of images. Labels in every set count, too.

    `line` has the result in words, `sizes` the number of sets with 0, 1, 2, … classes. Of each class `covered` has the
    number of its images whose set has it, and `size` the mean size of the sets of its images.
    """
    probabilities = (calibration.probabilities(logits) for logits, _ in _chunks(outputs))
    in_set = torch.cat([calibration.in_sets(p, coverage) for p in probabilities]).numpy()
    labels = outputs.labels.numpy()
    has_label = labels > 0 if labels.ndim > 1 else labels[:, None] == np.arange(in_set.shape[1])
    what = "labels" if labels.ndim > 1 else "classes"
    size = in_set.sum(axis=1)
    covered = (in_set & has_label).sum(axis=0)
    hits = int(covered.sum())
    total = int(has_label.sum())
    share = percent(hits / max(1, total))
    if labels.ndim == 1:  # several labels of an image are no independent trials
        share += f", 95 % interval {interval(hits, total)}"
    found = (
        f"sets for {100 * coverage:g} %: {hits:,} of {total:,} true {what} are in them ({share})"
    )
    return {
        "coverage": coverage,
        "line": f"{found}; {size.mean():.2f} {what} in a set on average",
        "covered": covered.tolist(),
        "size": (size @ has_label / np.maximum(has_label.sum(axis=0), 1)).tolist(),
        "sizes": np.bincount(size).tolist(),
    }


def _share(parts: Array, wholes: Array) -> Array:
    """Return quotients; NaN for 0 / 0."""
    return np.divide(parts, wholes, out=np.full(np.shape(wholes), math.nan), where=wholes > 0)


def _by_name(metric: str, of_classes: Array, names: Sequence[str]) -> dict[str, float]:
    """Return the values of a metric for each class (K,) under names such as `recall/cat`."""
    return {f"{metric}/{c}": float(v) for c, v in zip(names, of_classes, strict=True)}


def calibration_error(probabilities: Array, is_right: Array) -> float:
    """Return the expected calibration error: the difference of probability and share, averaged over 15 equal bins.

    Args:
        probabilities: (N,).
        is_right: Whether the prediction is correct, (N,) bool.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 2.
    """
    # in float32, as torchmetrics has it
    bins = np.searchsorted(_EDGES, probabilities.astype(np.float32), side="right") - 1
    differences = np.bincount(bins, probabilities - is_right, len(_EDGES))
    return float(np.abs(differences).sum() / len(probabilities))


def bootstrap_interval(value: float, labels: Array, scores: Array) -> tuple[float, float]:
    """Return the 95 % interval of a mean average precision. It does not depend on chance: the seed is fixed.

    The average precision of few images is too high. Samples show by how much: their mean is above `value` by about as
    much as `value` is above that of infinitely many images. With the corrected value m and the variance v of the
    samples, the interval is Wilson's for a share m of n = m (1 - m) / v images, at most `num_trials_of_labels`.

    Args:
        value: The mean average precision.
        labels: Whether each image has each label, (N, K) bool.
        scores: Logits or probabilities, (N, K).
    """
    num_trials = num_trials_of_labels(labels.sum(axis=0))
    if num_trials == 0:
        return 0.0, 1.0
    rng = np.random.default_rng(0)
    num_images = len(labels)
    num_samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, _MAX_SCORES // labels.size))
    drawn = [rng.integers(num_images, size=num_images) for _ in range(num_samples)]
    counts = np.stack([np.bincount(each, minlength=num_images) for each in drawn])
    of_samples = sampled_average_precision(scores, labels, counts)
    means = np.nan_to_num([mean_average_precision(of_labels) for of_labels in of_samples])
    corrected = min(max(2 * value - float(means.mean()), _EDGE), 1 - _EDGE)
    variance = float(means.var())
    if variance > 0:
        num_trials = min(num_trials, corrected * (1 - corrected) / variance)
    low, high = wilson(corrected * num_trials, num_trials)
    return min(low, value), max(high, value)
