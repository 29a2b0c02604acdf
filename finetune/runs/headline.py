"""The result of a run in one or two sentences, and its title: the terminal, the report and a notebook show the same."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.runs.outcome import approximate_interval, mean_precision_interval, mean_precision_text
from finetune.runs.record import RunRecord
from finetune.runs.statistics import accuracy_line, interval, num_right_of, percent, wilson


@dataclass(frozen=True)
class Headline:
    """The accuracy of a run; if images have several labels, the mean average precision.

    Attributes:
        split: `test` or `validation`; "" if no accuracy is known.
        share: The accuracy, in [0, 1].
        num: Number of images that it was measured on; 0 if that is not known.
        comment: A sentence that helps to judge it.
        baseline: Accuracy of always predicting the most frequent class, or the mean average precision of guesses; None
            if it is not known.
        precision_interval: The 95 % interval of a mean average precision; None for an accuracy.
    """

    split: str
    share: float
    num: int
    comment: str
    baseline: float | None = None
    precision_interval: tuple[float, float] | None = None

    @property
    def metric(self) -> str:
        """The name of the metric."""
        return "accuracy" if self.precision_interval is None else "mAP"

    @property
    def value(self) -> str:
        """The value of the metric as text."""
        return percent(self.share) if self.precision_interval is None else f"{self.share:.3f}"

    @property
    def num_correct(self) -> int:
        return round(self.share * self.num)

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % interval."""
        if self.precision_interval is not None:
            return self.precision_interval
        return wilson(self.num_correct, self.num)

    @property
    def interval(self) -> str:
        """The 95 % interval as text."""
        if self.precision_interval is not None:
            low, high = self.precision_interval
            return f"{low:.3f}–{high:.3f}"
        return interval(self.num_correct, self.num)

    def __str__(self) -> str:
        if not self.split:
            return self.comment
        if self.precision_interval is not None:
            mean = mean_precision_text(self.share, self.precision_interval)
            return f"{self.split} mAP {mean}, on {self.num:,} images. {self.comment}"
        if not self.num:
            return f"{self.split} accuracy {percent(self.share)}. {self.comment}"
        return f"{accuracy_line(self.num_correct, self.num, self.split)}. {self.comment}"


def headline(run: RunRecord) -> Headline:
    """Return the test result of a run, or else that of the validation: accuracy, or mean average precision."""
    if run.result.get("label_counts") and run.result.get("test/mAP") is not None:
        return _of_labels(run)
    matrix = run.result.get("confusion_matrix")
    if matrix:
        num_correct, num = num_right_of(matrix)
        largest = max(range(len(matrix)), key=lambda i: sum(matrix[i]))
        baseline = sum(matrix[largest]) / max(1, num)
        name = run.result["class_names"][largest]
        comment = f"Always predicting {name}: {percent(baseline)}."
        return Headline("test", num_correct / max(1, num), num, comment, baseline)
    if run.best and run.validated:
        accuracy, num = run.validated
        metric = "mAP" if run.has_labels else "accuracy"
        comment = (
            f"Not tested. best.ckpt ({run.weights_of_best}) was chosen on these images, "
            f"so this {metric} may be slightly too high."
        )
        bounds = approximate_interval(accuracy, run.num_trials) if run.has_labels else None
        return Headline("validation", accuracy, num, comment, precision_interval=bounds)
    return Headline("", 0.0, 0, "No accuracy: nothing was validated or tested.")


def _of_labels(run: RunRecord) -> Headline:
    counts = np.array(run.result["label_counts"])
    num = int(counts[0].sum())
    positives = counts[:, 1].sum(axis=1)
    # Images in random order: the expected average precision of a label is about its share of the images.
    chance = float(positives[positives > 0].mean() / num)
    exact = percent(run.result["test/exact_match"])
    comment = (
        f"All labels are right for {exact} of the images. Guessing at random: mAP {chance:.3f}."
    )
    bounds = mean_precision_interval(run.result)
    return Headline(
        split="test",
        share=run.result["test/mAP"],
        num=num,
        comment=comment,
        baseline=chance,
        precision_interval=bounds,
    )


def title(run: RunRecord) -> str:
    """Return data set and network, `flowers, resnet18`; the name of the run if neither is known."""
    return ", ".join(filter(None, (data_set(run), network(run)))) or run.name


def data_set(run: RunRecord) -> str:
    """Return the name of the folder of the data set; "" if it is not known."""
    root = run.about.get("root") or run.setting("data", "init_args", "root")
    folder = str(run.about.get("folder", ""))
    return Path(folder, root).name if isinstance(root, str) else ""


def network(run: RunRecord) -> str:
    """Return the name of the backbone, with the number of members if it is an ensemble."""
    backbone = str(run.setting("model", "backbone") or "")
    members = run.setting("model", "members") or 1
    return f"{members} × {backbone}" if members > 1 else backbone
