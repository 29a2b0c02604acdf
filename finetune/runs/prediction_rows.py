"""What a row of predictions has: the class of an image, or its labels if images have several."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune.system.messages import WrongUsage, shown

if TYPE_CHECKING:  # pages read the separator without torch
    from torch import Tensor

UNSURE = "unsure"  # predicted instead of a class that is not probable enough
DIGITS = 7  # of a probability
_MOST_PRINTED = 4  # classes of a single image, next to the predicted ones
MANY_CLASSES = 50  # with more classes, the rows of `test` have the five most probable classes only
_SEPARATORS = (";", "|", "\t")

# Shapes: B images, K classes.

Row = dict[str, Any]


def label_separator(class_names: Sequence[str]) -> str:
    """Return the character between the labels of an image in a CSV file: `;`, or another one if a name has it."""
    unused = (mark for mark in _SEPARATORS if not any(mark in name for name in class_names))
    return next(unused, _SEPARATORS[0])


class ClassRows:
    """Rows with the predicted class of an image and the probability of each class.

    Args:
        names: The classes.
        split: `predict` or `test`.
        top_k: Number of classes in a row; None for all.
        abstain_below: Predict `unsure` if the predicted class is less probable than that.
    """

    def __init__(
        self, names: Sequence[str], split: str, top_k: int | None, abstain_below: float
    ) -> None:
        if split == "test":
            top_k = 5 if len(names) > MANY_CLASSES else None
        elif top_k is not None and top_k > len(names):
            raise WrongUsage(f"--top_k {top_k}: there are only {len(names)} classes")
        if split != "test" and abstain_below and UNSURE in names:
            raise ValueError(
                f"--abstain_below would predict {UNSURE}, which is one of the classes: omit it"
            )
        self.names = names
        self.top_k = top_k
        self.abstain_below = abstain_below
        extra = [f"p_{name}" for name in names]
        if top_k is not None:
            extra = [
                f"{what}_{i}" for i in range(2, top_k + 1) for what in ("class", "probability")
            ]
        label = ["label"] if split == "test" else []
        self.columns = ["path", *label, "class", "probability", *extra, "error"]

    def target(self, target: int) -> Row:
        """Return the columns of the true class."""
        return {"label": self.names[target]}

    def predictions(self, probabilities: "Tensor", decided: "Tensor") -> list[Row]:
        """Return the columns of the prediction for each image.

        Args:
            probabilities: (B, K).
            decided: Index of the predicted class of each image (B,).
        """
        order = probabilities.argsort(dim=1, descending=True, stable=True).tolist()
        results = zip(probabilities.tolist(), decided.tolist(), order, strict=True)
        return [self._row(values, predicted, best) for values, predicted, best in results]

    def _row(self, values: list[float], predicted: int, best: list[int]) -> Row:
        # With a threshold the predicted class need not be the most probable one. It comes first.
        best = [predicted, *(k for k in best if k != predicted)]
        is_sure = values[predicted] >= self.abstain_below
        row: Row = {
            "class": self.names[predicted] if is_sure else UNSURE,
            "probability": round(values[predicted], DIGITS),
        }
        if self.top_k is None:
            return row | _columns_of(self.names, values)
        for i in range(2, self.top_k + 1):
            k = best[i - 1]
            row |= {f"class_{i}": self.names[k], f"probability_{i}": round(values[k], DIGITS)}
        return row

    def counted(self, row: Row) -> list[str | None]:
        """Return what the summary counts of a row: None if the image cannot be decoded."""
        return [row["class"]]

    def as_text(self, row: Row) -> Row:
        """Return a row with text and numbers only, for a CSV file."""
        return row

    def count_text(self, counts: Mapping[str | None, int]) -> str:
        """Return the counts of all images in words."""
        return ", ".join(f"{num} {name or 'unreadable'}" for name, num in _most_common(counts))

    def describe(self, row: Row) -> str:
        """Return the prediction for a single image in words."""
        probability = f", probability {row['probability']:.4f}" if row["class"] else ""
        return f"{row['class'] or 'unreadable'}{probability}"

    def others(self, row: Row) -> str:
        """Return the classes next to the predicted one with their probabilities, the most probable first."""
        if self.top_k is None:
            named = {name: row[f"p_{name}"] for name in self.names if name != row["class"]}
            best = sorted(named.items(), key=lambda item: -item[1])[:_MOST_PRINTED]
        else:
            best = [(row[f"class_{i}"], row[f"probability_{i}"]) for i in range(2, self.top_k + 1)]
        text = ", ".join(f"{shown(name)} {value:.4f}" for name, value in best)
        return f"other classes: {text}" if text else ""


class LabelRows:
    """Rows with the predicted labels of an image and the probability of each label.

    In `test` the column `labels` has the true labels and `predicted` the predicted ones; in `predict` `labels` has the
    predicted ones, so that the file can be read as a table of images.

    Args:
        names: The labels.
        split: `predict` or `test`.
        thresholds: The probability from which an image has a label, for each label.
    """

    def __init__(self, names: Sequence[str], split: str, thresholds: Sequence[float]) -> None:
        self.names = names
        self.thresholds = dict(zip(names, thresholds, strict=True))
        self.separator = label_separator(names)
        self.column = "predicted" if split == "test" else "labels"
        labels = ["labels", "predicted"] if split == "test" else ["labels"]
        self.columns = ["path", *labels, *(f"p_{name}" for name in names), "error"]

    def target(self, target: Sequence[int]) -> Row:
        """Return the columns of the true labels, from whether the image has each label (K,)."""
        return {"labels": self._named(target)}

    def predictions(self, probabilities: "Tensor", decided: "Tensor") -> list[Row]:
        """Return the columns of the prediction for each image.

        Args:
            probabilities: (B, K).
            decided: Whether each label is predicted (B, K).
        """
        return [
            {self.column: self._named(chosen)} | _columns_of(self.names, values)
            for values, chosen in zip(probabilities.tolist(), decided.tolist(), strict=True)
        ]

    def _named(self, chosen: Sequence[int]) -> list[str]:
        return [name for name, is_chosen in zip(self.names, chosen, strict=True) if is_chosen]

    def counted(self, row: Row) -> list[str | None]:
        """Return what the summary counts of a row: its labels, "" for none; None if the image cannot be decoded."""
        if row["error"] is not None:
            return [None]
        return row[self.column] or [""]

    def as_text(self, row: Row) -> Row:
        """Return a row with text and numbers only, for a CSV file."""
        lists = {name: row[name] for name in ("labels", "predicted") if row.get(name) is not None}
        return row | {name: self.separator.join(labels) for name, labels in lists.items()}

    def count_text(self, counts: Mapping[str | None, int]) -> str:
        """Return the counts of all images in words. An image counts for each of its labels."""
        words = {None: "unreadable", "": "without labels"}
        return ", ".join(f"{num} {words.get(name, name)}" for name, num in _most_common(counts))

    def describe(self, row: Row) -> str:
        """Return the prediction for a single image in words."""
        if row["error"] is not None:
            return "unreadable"
        return ", ".join(self._with_threshold(row, name) for name in row["labels"]) or "no label"

    def others(self, row: Row) -> str:
        """Return the labels that are not predicted with their probabilities, the most probable first."""
        rest = [name for name in self.names if name not in row["labels"]]
        best = sorted(rest, key=lambda name: -row[f"p_{name}"])[:_MOST_PRINTED]
        text = ", ".join(self._with_threshold(row, name) for name in best)
        return f"not predicted: {text}" if text else ""

    def _with_threshold(self, row: Row, name: str) -> str:
        return f"{shown(name)} {row[f'p_{name}']:.4f} (threshold {self.thresholds[name]:.4f})"


def _columns_of(names: Sequence[str], values: Sequence[float]) -> Row:
    return {f"p_{name}": round(value, DIGITS) for name, value in zip(names, values, strict=True)}


def _most_common(counts: Mapping[str | None, int]) -> list[tuple[str | None, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
