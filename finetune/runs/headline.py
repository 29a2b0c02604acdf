"""The result of a run in one sentence, made once and kept in run.json: terminal, pages and notebook show the same."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from finetune.runs.intervals import interval, num_right_of, percent, wilson
from finetune.system.messages import counted

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=10**15)]

INTERVAL = "mAP_interval"  # in test.json
NO_RESULT = "No accuracy: nothing was validated or tested."


class Headline(Struct, frozen=True, kw_only=True):
    """The accuracy of a run with its 95 % interval; if images have several labels, the mean average precision.

    Attributes:
        split: `test` or `validation`.
        metric: `accuracy` or `mAP`.
        value: The value of the metric.
        low: The lower end of the interval.
        high: The upper end of the interval.
        num_images: Number of images that it was measured on.
        comment: A sentence that helps to judge it; "" for none.
        unit: What is counted: `images`, or `groups` of them.
        baseline: Accuracy of always predicting the most frequent class, or the mean average precision of guesses; None
            if it is not known.
    """

    split: str
    metric: str
    value: Share
    low: Share
    high: Share
    num_images: Count
    comment: str = ""
    unit: str = "images"
    baseline: Share | None = None

    @property
    def value_text(self) -> str:
        """The value of the metric as text."""
        return percent(self.value) if self.metric == "accuracy" else f"{self.value:.3f}"

    @property
    def interval_text(self) -> str:
        """The 95 % interval as text."""
        if self.metric == "accuracy":
            return interval(self.num_right, self.num_images)
        return f"{self.low:.3f}–{self.high:.3f}"

    @property
    def num_right(self) -> int:
        """The number of images that are predicted correctly, if the metric is the accuracy."""
        return round(self.value * self.num_images)

    @property
    def line(self) -> str:
        """The sentence without the comment."""
        if self.metric == "accuracy":
            counts = f"{self.num_right:,} of {self.num_images:,}"
            if self.unit != "images":
                counts += f" {self.unit}"
            values = f"({counts}; 95 % interval {self.interval_text})"
        else:
            values = f"(95 % interval {self.interval_text}), on {self.num_images:,} {self.unit}"
        return f"{self.split} {self.metric} {self.value_text} {values}"

    def __str__(self) -> str:
        return f"{self.line}. {self.comment}" if self.comment else self.line


class Best(Struct, frozen=True, kw_only=True):
    """The weights of best.ckpt, and their result on the validation images that chose them.

    Attributes:
        epoch: The epoch, counted from one; 0 for the weights before training.
        weights: Which weights best.ckpt has, in few words, such as `epoch 3`.
        why: The same in a sentence, with the reason.
        result: What was measured.
    """

    epoch: Count
    weights: str
    why: str
    result: Headline


def best_of_epoch(
    epoch: int, value: float, highest: float, monitor: str, num_images: int, num_trials: float
) -> Best:
    """Return the record of a best.ckpt with the weights of an epoch.

    Args:
        epoch: The epoch, counted from one; 0 for the weights before training.
        value: The value of the monitored metric.
        highest: Its highest value so far.
        monitor: The metric, such as `val/accuracy`.
        num_images: Number of validation images.
        num_trials: The same; for a mean average precision the effective number, `best_epoch.num_trials_of_labels`.
    """
    weights = f"epoch {epoch}" if epoch else "before training"
    metric = monitor.partition("/")[2]
    result = validation_headline(metric, value, num_images, num_trials, weights)
    rank = f"; latest within one standard error of the best, {highest:.4f}"
    why = f"{weights} ({monitor} {value:.4f}{', the best' if value == highest else rank})"
    return Best(epoch=epoch, weights=weights, why=why, result=result)


def validation_headline(
    metric: str, value: float, num_images: int, num_trials: float, weights: str
) -> Headline:
    """Return the result of best.ckpt on the validation images.

    Args:
        metric: `accuracy` or `mAP`.
        value: Its value.
        num_images: Number of validation images.
        num_trials: The same; for a mean average precision the effective number.
        weights: Which weights best.ckpt has, in few words.
    """
    low, high = wilson(value * num_trials, num_trials)
    return Headline(
        split="validation",
        metric=metric,
        value=value,
        low=low,
        high=high,
        num_images=num_images,
        comment=f"Not tested. best.ckpt ({weights}) was chosen on these images, so this {metric} may be slightly too "
        "high.",
    )


def headline_of(result: Mapping[str, Any], split: str = "test") -> Headline | None:
    """Return the result of an evaluation; None if it has neither an accuracy nor a mean average precision.

    Args:
        result: The content of test.json or val.json.
        split: The prefix of its metrics: `test` or `val`.
    """
    name = "test" if split == "test" else "validation"
    if result.get("confusion_matrix"):
        return _of_classes(result["confusion_matrix"], result.get("class_names"), name)
    if result.get("label_counts") and result.get(f"{split}/mAP") is not None:
        return _of_labels(result, split, name)
    return None


def headline_of_groups(result: Mapping[str, Any], split: str = "test") -> Headline | None:
    """Return the result of an evaluation with groups counted instead of images; None without groups; see above."""
    groups = result.get("groups", {})
    headline = headline_of({"class_names": result.get("class_names"), **groups}, split)
    if headline is None:
        return None
    why = {
        "num_mixed": "with images of different classes",
        "num_unread": "without a readable image",
    }
    numbers = [(counted(groups[name], "group"), text) for name, text in why.items() if groups[name]]
    left_out = ", ".join(f"{num} {text}" for num, text in numbers)
    comment = f"{headline.comment} Left out: {left_out}." if left_out else headline.comment
    return structs.replace(headline, unit="groups", comment=comment)


def _of_classes(
    matrix: Sequence[Sequence[int]], names: Sequence[str] | None, split: str
) -> Headline:
    num_right, num = num_right_of(matrix)
    largest = max(range(len(matrix)), key=lambda i: sum(matrix[i]))
    baseline = sum(matrix[largest]) / max(1, num)
    low, high = wilson(num_right, num)
    return Headline(
        split=split,
        metric="accuracy",
        value=num_right / max(1, num),
        low=low,
        high=high,
        num_images=num,
        comment=f"Always predicting {names[largest]}: {percent(baseline)}." if names else "",
        baseline=baseline,
    )


def _of_labels(result: Mapping[str, Any], split: str, name: str) -> Headline:
    import numpy as np  # which the list of commands and a typo do not need

    counts = np.array(result["label_counts"])
    num = int(counts[0].sum())
    positives = counts[:, 1].sum(axis=1)
    # Images in random order: the expected average precision of a label is about its share of the images.
    chance = float(positives[positives > 0].mean() / num)
    low, high = mean_precision_interval(result, split)
    exact = percent(result[f"{split}/exact_match"])
    return Headline(
        split=name,
        metric="mAP",
        value=min(1.0, result[f"{split}/mAP"]),  # rounding may put a mean of ones above 1
        low=low,
        high=high,
        num_images=num,
        comment=f"All labels are right for {exact} of the images. Guessing at random: mAP {chance:.3f}.",
        baseline=chance,
    )


def mean_precision_interval(result: Mapping[str, Any], split: str = "test") -> tuple[float, float]:
    """Return the 95 % interval of the mean average precision of an evaluation.

    It is that of `bootstrap` if it was computed. Otherwise it is Wilson's, for a share of the effective number of
    images of `best_epoch.num_trials_of_labels`.

    Args:
        result: The content of test.json or val.json.
        split: The prefix of its metrics: `test` or `val`.
    """
    if result.get(INTERVAL) is not None:
        low, high = result[INTERVAL]
        return float(low), float(high)
    import numpy as np  # as above

    from finetune.runs.best_epoch import num_trials_of_labels

    num = num_trials_of_labels(np.array([fn + tp for _, (fn, tp) in result["label_counts"]]))
    return wilson(result[f"{split}/mAP"] * num, num)
