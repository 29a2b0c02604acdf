"""Which epoch of a run is kept as its best: the latest that can't be told from the most accurate one.

Of 30 validation pictures the highest accuracy of 25 to 50 epochs is a lucky one's, often an early one's. The rule of
one standard error (Breiman et al., Classification and Regression Trees, 1984, section 3.4.3) takes the simplest model
within one standard error of the best; under a rate that falls, the latest is the one that has settled. What it gives on
four small sets stands in docs/benchmarks.md, under "Which epoch is kept".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MONITOR = "val/accuracy"


def standard_error(accuracy: float, num_images: int) -> float:
    """Return the standard error of an accuracy measured on so many images; 0 if their number is 0, unknown."""
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
    """Return the place of the validation that is kept among a run's, (num_validations,), of which there is one."""
    lowest = lowest_kept(max(accuracies), num_images)
    return max(i for i, accuracy in enumerate(accuracies) if accuracy >= lowest)


def told(epoch: int, accuracy: float, highest: float) -> str:
    """Return in words why an epoch was kept, counted from one."""
    if accuracy == highest:
        return f"of epoch {epoch}: the highest val/accuracy, {highest:.4f}"
    return (
        f"of epoch {epoch}: val/accuracy {accuracy:.4f}, "
        f"the last within a standard error of the highest, {highest:.4f}"
    )


def highest_of(state: Mapping[str, Any]) -> float | None:
    """Return the highest accuracy in the state of `Checkpoints`, None without a validation.

    Of a run that began when the highest was kept, whatever its epoch, it stood beside the loss.
    """
    if "highest" in state:
        return state["highest"]
    return state["best_score"][0] if state["best_score"] else None
