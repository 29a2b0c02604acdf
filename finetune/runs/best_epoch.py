"""The choice of the best epoch: the latest one within one standard error of the highest accuracy.

With 30 validation images, the highest accuracy among 25 to 50 epochs is a matter of luck, and often an
early one. The one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984,
section 3.4.3) takes the simplest model within one standard error of the best. With a falling learning
rate, the latest epoch is the one that has converged. benchmarks/NOTEBOOK.md has results on four small
data sets, under "Which epoch is kept".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MONITOR = "val/accuracy"


def standard_error(accuracy: float, num_images: int) -> float:
    """Return the standard error of an accuracy on `num_images` images; 0 if the number is unknown, which is 0."""
    return math.sqrt(accuracy * (1 - accuracy) / num_images) if num_images else 0.0


def lowest_kept(
    highest: float, num_images: int, error_of: Callable[[float, int], float] = standard_error
) -> float:
    """Return the lowest value of the monitored metric that is within a standard error of the highest.

    Args:
        highest: The highest value so far.
        num_images: Number of validation images; 0 if it is unknown.
        error_of: Returns the standard error of a value on so many images.
    """
    return highest - error_of(highest, num_images)


def kept_epoch(accuracies: Sequence[float], num_images: int) -> int:
    """Return the index of the validation that is kept.

    Args:
        accuracies: Accuracy of each validation of a run, (num_validations,), at least one.
        num_images: Number of validation images; 0 if it is unknown.
    """
    lowest = lowest_kept(max(accuracies), num_images)
    return max(i for i, accuracy in enumerate(accuracies) if accuracy >= lowest)


def describe(epoch: int, accuracy: float, highest: float) -> str:
    """Return the epoch of best.ckpt, counted from one, and why it was chosen."""
    if accuracy == highest:
        return f"epoch {epoch} (val/accuracy {accuracy:.4f}, the best)"
    return (
        f"epoch {epoch} (val/accuracy {accuracy:.4f}; "
        f"latest within one standard error of the best, {highest:.4f})"
    )


def highest_of(state: Mapping[str, Any]) -> float | None:
    """Return the highest accuracy in the state of `Checkpoints`; None if there was no validation yet.

    Checkpoints of earlier versions have it in `best_score`, together with the loss.
    """
    if "highest" in state:
        return state["highest"]
    return state["best_score"][0] if state["best_score"] else None
