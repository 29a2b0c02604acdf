"""The result of an evaluation in a line, with its interval."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.data.batch_limits import num_within
from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.statistics import accuracy_line, num_right_of, percent, wilson

# Shapes: K labels.

INTERVAL = "mAP_interval"  # in test.json
# The metrics that are printed and compared, in this order. An evaluation has some of them.
METRICS = (
    "accuracy",
    "mAP",
    "loss",
    "f1",
    "f1_macro",
    "f1_micro",
    "exact_match",
    "hamming_distance",
    "calibration_error_before_scaling",
    "calibration_error",
)


def outcome_line(result: Mapping[str, Any], split: str = "test") -> str:
    """Return the accuracy, or the mean average precision of several labels, with its interval; "" if there is none.

    Args:
        result: The content of test.json or val.json.
        split: The prefix of its metrics: `test` or `val`.
    """
    name = "test" if split == "test" else "validation"
    if result.get("confusion_matrix"):
        return accuracy_line(*num_right_of(result["confusion_matrix"]), name)
    if not result.get("label_counts") or result.get(f"{split}/mAP") is None:
        return ""
    counts: Sequence[Any] = result["label_counts"]
    num_images = int(np.sum(counts[0]))
    mean = mean_precision_text(result[f"{split}/mAP"], mean_precision_interval(result, split))
    exact = percent(result[f"{split}/exact_match"])
    return f"{name} mAP {mean}, on {num_images:,} images; exact match {exact}"


def num_in_split(about: Mapping[str, Any], split: str) -> int:
    """Return the number of images of a split from the content of about.json; 0 if it is unknown."""
    facts = about.get("splits", {}).get(split, {})
    return int(facts.get("num_images", sum(facts.get("counts", {}).values())))


def num_validated(about: Mapping[str, Any], setting: Callable[..., Any]) -> int:
    """Return the number of images of each validation of a fit; 0 if it is unknown.

    Args:
        about: The content of about.json.
        setting: Returns a value of config.yaml by its keys; None if it is not there.
    """
    limit = setting("trainer", "limit_val_batches")
    batch_size = setting("data", "init_args", "batch_size") or 1
    return num_within(limit, num_in_split(about, "val"), batch_size)


def label_trials(about: Mapping[str, Any], num_images: int) -> float:
    """Return the effective number of validation images of a mean average precision.

    See `best_epoch.num_trials_of_labels`.

    Args:
        about: The content of about.json.
        num_images: Number of images that were measured. If it is a part, each label is assumed to have its share.
    """
    counts = about.get("splits", {}).get("val", {}).get("counts", {})
    share = num_images / max(1, num_in_split(about, "val"))
    return num_trials_of_labels(share * np.array([*counts.values()], np.float64))


def mean_precision_interval(result: Mapping[str, Any], split: str = "test") -> tuple[float, float]:
    """Return the 95 % interval of the mean average precision of an evaluation.

    It is that of `bootstrap` if it was computed, and else the approximation of `best_epoch.num_trials_of_labels`.

    Args:
        result: The content of test.json or val.json.
        split: The prefix of its metrics: `test` or `val`.
    """
    if result.get(INTERVAL) is not None:
        low, high = result[INTERVAL]
        return float(low), float(high)
    counts = np.array([fn + tp for _, (fn, tp) in result["label_counts"]])
    return approximate_interval(result[f"{split}/mAP"], num_trials_of_labels(counts))


def approximate_interval(value: float, num_trials: float) -> tuple[float, float]:
    """Return the 95 % interval of a mean average precision: Wilson's for a share of its effective number of images."""
    return wilson(value * num_trials, num_trials)


def mean_precision_text(value: float, interval: tuple[float, float]) -> str:
    """Return a mean average precision with its 95 % interval: `0.842 (95 % interval 0.801–0.876)`."""
    low, high = interval
    return f"{value:.3f} (95 % interval {low:.3f}–{high:.3f})"
