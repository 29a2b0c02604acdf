"""Predictions as rows of a CSV file, and in words."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any

from finetune.runs.predictions_table import MANY_CLASSES, NUM_BEST, label_separator
from finetune.system.messages import WrongUsage, shown
from finetune.training.prediction import ONE_CLASS, DecisionRule, Prediction, rounded

_MOST_PRINTED = 4  # classes of a single image, next to the predicted ones

Outcome = Prediction | str  # of an image that cannot be decoded, the reason


class Rows:
    """The rows of predictions.csv or test_predictions.csv, and what is printed of them.

    With one class an image, a row has the predicted class and the probability of each class. With several labels it
    has all predicted labels: in `predict` in the column `labels`, so that the file can be read as a table of images,
    and in `test`, where `labels` has the true ones, in `predicted`. The file of groups has `group_columns`.

    Args:
        rule: How images are predicted.
        is_test: Whether the rows also have the true class or labels.
        top_k: Number of classes in a row; None for all.
        has_groups: Whether the images have groups.
    """

    def __init__(
        self,
        rule: DecisionRule,
        is_test: bool = False,
        top_k: int | None = None,
        has_groups: bool = False,
    ) -> None:
        self.rule = rule
        names = rule.class_names
        if top_k is not None and not rule.is_single:
            raise WrongUsage(ONE_CLASS, "top_k")
        if top_k is not None and top_k > len(names):
            raise WrongUsage(f"--top_k {top_k}: there are only {len(names)} classes")
        if is_test and rule.is_single and len(names) > MANY_CLASSES:
            top_k = NUM_BEST
        self.top_k = top_k
        self._separator = label_separator(names)
        self._true_column = "label" if rule.is_single else "labels"
        self._predicted_column = "predicted" if is_test else "labels"
        if rule.is_single:
            self._predicted_column = "class"
        columns = (
            [self._true_column, self._predicted_column] if is_test else [self._predicted_column]
        )
        columns += ["probability"] if rule.is_single else []
        if top_k is None:
            columns += [f"p_{name}" for name in names]
        else:
            best = range(2, top_k + 1)
            columns += [f"{what}_{i}" for i in best for what in ("class", "probability")]
        own = [column.name for column in rule.columns]
        means = [] if rule.is_single else [f"mean_{name}" for name in names]
        self.columns = ["path", *(["group"] if has_groups else []), *columns, *own, "error"]
        self.group_columns = ["group", "images", *columns, *means, "error"]

    def cells(
        self, one: Outcome, true: Iterable[int] = (), means: Sequence[float] = ()
    ) -> dict[str, Any]:
        """Return the cells of an image or a group, except its name; a missing one is empty.

        Args:
            one: The prediction.
            true: In a test the index of the true class, or those of the true labels.
            means: Of several labels and a group, the mean of the probabilities of its images, K.
        """
        names = self.rule.class_names
        row: dict[str, Any] = {self._true_column: self._cell(tuple(names[k] for k in true))}
        if isinstance(one, str):
            return row | {"error": one}
        p = {name: rounded(value) for name, value in one.probabilities.items()}
        row[self._predicted_column] = self._cell(self.predicted(one))
        if self.rule.is_single:
            row["probability"] = rounded(one.probability)
        of_names = zip(names, means, strict=False)
        row |= {f"mean_{name}": rounded(value) for name, value in of_names}
        row |= {column.name: self._cell(getattr(one, column.name)) for column in self.rule.columns}
        if self.top_k is None:
            return row | {f"p_{name}": value for name, value in p.items()}
        for i, name in enumerate(self._best(one, self.top_k)[1:], 2):
            row |= {f"class_{i}": name, f"probability_{i}": p[name]}
        return row

    def _cell(self, value: Any) -> Any:
        return self._separator.join(value) if isinstance(value, tuple) else rounded(value)

    def _best(self, one: Prediction, num: int) -> list[str]:
        """Return the predicted class, and then the most probable other ones, `num` in all.

        With a threshold the predicted class need not be the most probable one.
        """
        p = one.probabilities
        return nsmallest(num, p, key=lambda name: (name not in one.labels, -p[name]))

    def predicted(self, one: Prediction) -> tuple[str, ...]:
        """Return the predicted class, which may be `none` or `unsure`, or the predicted labels."""
        return (one.label,) if self.rule.is_single else one.labels

    def counted(self, one: Outcome) -> Sequence[str | None]:
        """Return what the summary counts of an image: None if it cannot be decoded, "" if it has no label."""
        return [None] if isinstance(one, str) else self.predicted(one) or [""]

    def count_text(self, counts: Mapping[str | None, int]) -> str:
        """Return the counts of all images in words. An image counts for each of its labels."""
        words = {None: "unreadable", "": "without labels"}
        most_first = sorted(counts.items(), key=lambda item: -item[1])
        return ", ".join(f"{num} {words.get(name, name)}" for name, num in most_first)

    def describe(self, one: Outcome) -> str:
        """Return the prediction for a single image in words."""
        if isinstance(one, str):
            return "unreadable"
        if self.rule.is_single:
            text = f"{one.label}, probability {one.probability:.4f}"
        else:
            text = self._with_values(one, one.labels) or "no label"
        for column in self.rule.columns:
            value = getattr(one, column.name)
            if isinstance(value, tuple):
                text += f"; {column.name}: {', '.join(map(shown, value)) or 'no label'}"
            else:
                text += f"; {column.name} {value:.2f}"
        return text

    def others(self, one: Prediction) -> str:
        """Return the most probable of the classes that are not predicted, with their probabilities."""
        most = _MOST_PRINTED if self.top_k is None else self.top_k - 1
        best = self._best(one, len(one.labels) + most)[len(one.labels) :]
        what = "other classes" if self.rule.is_single else "not predicted"
        return f"{what}: {self._with_values(one, best)}" if best else ""

    def _with_values(self, one: Prediction, names: Sequence[str]) -> str:
        texts = []
        for name in names:
            end = "" if one.thresholds is None else f" (threshold {one.thresholds[name]:.4f})"
            texts.append(f"{shown(name)} {one.probabilities[name]:.4f}{end}")
        return ", ".join(texts)
