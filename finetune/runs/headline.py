"""The result of a run in one or two sentences, and its title: the terminal, the report and a notebook show the same."""

from dataclasses import dataclass
from pathlib import Path

from finetune.runs.record import RunRecord
from finetune.runs.statistics import accuracy_line, interval, percent, wilson


@dataclass(frozen=True)
class Headline:
    """The accuracy of a run.

    Attributes:
        split: `test` or `validation`; "" if no accuracy is known.
        share: The accuracy, in [0, 1].
        num: Number of images that it was measured on; 0 if that is not known.
        comment: A sentence that helps to judge it.
        baseline: Accuracy of always predicting the most frequent class; None if it is not known.
    """

    split: str
    share: float
    num: int
    comment: str
    baseline: float | None = None

    @property
    def num_correct(self) -> int:
        return round(self.share * self.num)

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return wilson(self.num_correct, self.num)

    @property
    def interval(self) -> str:
        """The 95 % interval of the accuracy as text."""
        return interval(self.num_correct, self.num)

    def __str__(self) -> str:
        if not self.split:
            return self.comment
        if not self.num:
            return f"{self.split} accuracy {percent(self.share)}. {self.comment}"
        return f"{accuracy_line(self.num_correct, self.num, self.split)}. {self.comment}"


def headline(run: RunRecord) -> Headline:
    """Return the test accuracy of a run, or else its validation accuracy."""
    matrix = run.result.get("confusion_matrix")
    if matrix:
        num = sum(map(sum, matrix))
        num_correct = sum(row[i] for i, row in enumerate(matrix))
        largest = max(range(len(matrix)), key=lambda i: sum(matrix[i]))
        baseline = sum(matrix[largest]) / max(1, num)
        name = run.result["class_names"][largest]
        comment = f"Always predicting {name}: {percent(baseline)}."
        return Headline("test", num_correct / max(1, num), num, comment, baseline)
    if run.best and run.validated:
        epoch, _ = run.best
        accuracy, num = run.validated
        comment = (
            f"Not tested. best.ckpt is from epoch {epoch}, chosen on these images, "
            "so this accuracy may be slightly too high."
        )
        return Headline("validation", accuracy, num, comment)
    return Headline("", 0.0, 0, "No accuracy: nothing was validated or tested.")


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
