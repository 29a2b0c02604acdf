"""What a row of predictions has: the class of an image, or its labels if images have several."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.system.messages import WrongUsage, shown

if TYPE_CHECKING:  # pages read the separator without torch
    from torch import Tensor

UNSURE = "unsure"  # predicted instead of a class that is not probable enough
NONE = "none"  # predicted instead of a class for an image that is not familiar enough
DIGITS = 7  # of a probability
NUM_BEST = 5  # classes in a row of a test with many classes
MANY_CLASSES = 50  # with more classes, the rows of `test` have only the most probable ones
_MOST_PRINTED = 4  # classes of a single image, next to the predicted ones
_SEPARATORS = (";", "|", "\t")

# Shapes: B images, K classes or labels.


def label_separator(class_names: Sequence[str]) -> str:
    """Return the character between the labels of an image in a CSV file: `;`, or another one if a name has it."""
    unused = (mark for mark in _SEPARATORS if not any(mark in name for name in class_names))
    return next(unused, _SEPARATORS[0])


def check_words(
    class_names: Sequence[str], abstain_below: float | None, none_below: float | None
) -> None:
    """Check that no class has the name of what is predicted instead of a class.

    Raises:
        ValueError: One has.
    """
    limits = {"abstain_below": (abstain_below, UNSURE), "none_below": (none_below, NONE)}
    for option, (limit, word) in limits.items():
        if limit and word in class_names:
            raise ValueError(f"{option} would predict {word}, which is one of the classes: omit it")


class Predicted(NamedTuple):
    """The prediction for an image.

    Attributes:
        path: Its path.
        chosen: Index of the predicted class, or indices of the predicted labels.
        p: Probability of each class or label, K.
        error: Why it cannot be decoded; "" for nothing.
        means: Of several labels and a group, the mean of the probabilities of its images, K, whose largest are `p`.
        in_set: Indices of the classes or labels of its prediction set, the most probable first; None without sets.
        familiar: Its familiarity, from 0 to 1; None if it is not known.
    """

    path: str
    chosen: Sequence[int] = ()
    p: Sequence[float] = ()
    error: str = ""
    means: Sequence[float] = ()
    in_set: Sequence[int] | None = None
    familiar: float | None = None


def predicted(
    paths: Sequence[str],
    probabilities: "Tensor",
    decided: "Tensor",
    sets: Any = None,
    familiar: "Tensor | None" = None,
) -> Iterator[Predicted]:
    """Yield the predictions for images that could be decoded.

    Args:
        paths: Their paths, B.
        probabilities: (B, K).
        decided: The predicted class of each image (B,), or whether each label is predicted (B, K).
        sets: Their prediction sets, as `Predicted.in_set`, B; None without sets.
        familiar: The familiarity of each image (B,); None if it is not known.
    """
    none = [None] * len(paths)
    known = none if familiar is None else familiar.tolist()
    columns = (paths, probabilities.tolist(), decided.tolist(), sets or none, known)
    for path, p, own, in_set, how_familiar in zip(*columns, strict=True):
        is_class = isinstance(own, int)
        chosen = [own] if is_class else [k for k, is_chosen in enumerate(own) if is_chosen]
        yield Predicted(path, chosen, p, in_set=in_set, familiar=how_familiar)


class Rows:
    """The rows of predictions.csv or test_predictions.csv, and what is printed of them.

    With one class an image, a row has the predicted class and the probability of each class. With several labels it
    has all predicted labels: in `predict` in the column `labels`, so that the file can be read as a table of images,
    and in `test`, where `labels` has the true ones, in `predicted`. The file of groups has `group_columns`.

    Args:
        names: The classes or labels, K.
        thresholds: The probability from which an image has a label, K; None with one class an image.
        is_test: Whether the rows also have the true class or labels.
        top_k: Number of classes in a row; None for all.
        abstain_below: Predict `unsure` if the predicted class is less probable than that.
        has_groups: Whether the images have groups.
        has_sets: Whether images have prediction sets, for a column `set`.
        none_below: Predict `none` if the image is less familiar than that; None if no familiarity is known.
    """

    def __init__(
        self,
        names: Sequence[str],
        thresholds: Sequence[float] | None = None,
        is_test: bool = False,
        top_k: int | None = None,
        abstain_below: float = 0.0,
        has_groups: bool = False,
        has_sets: bool = False,
        none_below: float | None = None,
    ) -> None:
        self.names = names
        self.thresholds = thresholds
        self.abstain_below = abstain_below
        self.none_below = none_below
        if top_k is not None and top_k > len(names):
            raise WrongUsage(f"--top_k {top_k}: there are only {len(names)} classes")
        check_words(names, abstain_below, none_below)
        if is_test and len(names) > MANY_CLASSES:
            top_k = NUM_BEST
        self.top_k = top_k if thresholds is None else None
        self._separator = label_separator(names)
        self._true = "label" if thresholds is None else "labels"
        self._column = "predicted" if is_test else "labels"
        columns = [self._true] if is_test else []
        columns += ["class", "probability"] if thresholds is None else [self._column]
        if self.top_k is None:
            columns += [f"p_{name}" for name in names]
        else:
            best = range(2, self.top_k + 1)
            columns += [f"{what}_{i}" for i in best for what in ("class", "probability")]
        # groups have neither sets nor familiarity
        own = [*columns, *(["set"] if has_sets else [])]
        own += [] if none_below is None else ["familiar"]
        self.columns = ["path", *(["group"] if has_groups else []), *own, "error"]
        means = [] if thresholds is None else [f"mean_{name}" for name in names]
        self.group_columns = ["group", "images", *columns, *means, "error"]

    def cells(
        self, one: Predicted, true: Sequence[int] = (), group: str = "", num_images: int = 1
    ) -> dict[str, Any]:
        """Return the cells of a row; a missing one is empty.

        Args:
            one: The prediction.
            true: In a test the index of the true class, or those of the true labels.
            group: The name of the group.
            num_images: Of a group, the number of images that could be decoded.
        """
        row: dict[str, Any] = {"path": one.path, "group": group, "images": num_images}
        row["error"] = one.error
        row[self._true] = self._joined(self.names[k] for k in true)
        if one.error:
            return row
        if one.familiar is not None:
            row["familiar"] = round(one.familiar, DIGITS)
        p = [round(value, DIGITS) for value in one.p]
        if self.thresholds is None:
            row |= {"class": self.predictions(one)[0], "probability": p[one.chosen[0]]}
        else:
            row[self._column] = self._joined(self.predictions(one))
            of_names = zip(self.names, one.means, strict=False)
            row |= {f"mean_{name}": round(value, DIGITS) for name, value in of_names}
        row["set"] = self._joined(self.names[k] for k in one.in_set or ())
        if self.top_k is None:
            return row | {f"p_{name}": value for name, value in zip(self.names, p, strict=True)}
        for i, k in enumerate(self._best(one, self.top_k)[1:], 2):
            row |= {f"class_{i}": self.names[k], f"probability_{i}": p[k]}
        return row

    def _joined(self, names: Iterator[str] | Sequence[str]) -> str:
        return self._separator.join(names)

    def _best(self, one: Predicted, num: int) -> list[int]:
        """Return the predicted class, and then the most probable other ones, `num` in all.

        With a threshold the predicted class need not be the most probable one.
        """
        return nsmallest(num, range(len(one.p)), key=lambda k: (k not in one.chosen, -one.p[k]))

    def predictions(self, one: Predicted) -> list[str]:
        """Return the predicted class, which may be `none` or `unsure`, or the predicted labels."""
        if one.familiar is not None and one.familiar < (self.none_below or 0):
            return [NONE]
        if self.thresholds is None and one.p[one.chosen[0]] < self.abstain_below:
            return [UNSURE]
        return [self.names[k] for k in one.chosen]

    def counted(self, one: Predicted) -> list[str | None]:
        """Return what the summary counts of an image: None if it cannot be decoded, "" if it has no label."""
        return [None] if one.error else [*self.predictions(one)] or [""]

    def count_text(self, counts: Mapping[str | None, int]) -> str:
        """Return the counts of all images in words. An image counts for each of its labels."""
        words = {None: "unreadable", "": "without labels"}
        most_first = sorted(counts.items(), key=lambda item: -item[1])
        return ", ".join(f"{num} {words.get(name, name)}" for name, num in most_first)

    def describe(self, one: Predicted) -> str:
        """Return the prediction for a single image in words."""
        if one.in_set is not None:
            members = ", ".join(shown(self.names[k]) for k in one.in_set) or "no label"
            return f"{self.describe(one._replace(in_set=None))}; set: {members}"
        if one.error:
            return "unreadable"
        if self.thresholds is None:
            familiar = "" if one.familiar is None else f"; familiar {one.familiar:.2f}"
            return f"{self.predictions(one)[0]}, probability {one.p[one.chosen[0]]:.4f}{familiar}"
        return self._with_values(one, one.chosen) or "no label"

    def others(self, one: Predicted) -> str:
        """Return the most probable of the classes that are not predicted, with their probabilities."""
        most = _MOST_PRINTED if self.top_k is None else self.top_k - 1
        best = self._best(one, len(one.chosen) + most)[len(one.chosen) :]
        what = "other classes" if self.thresholds is None else "not predicted"
        return f"{what}: {self._with_values(one, best)}" if best else ""

    def _with_values(self, one: Predicted, chosen: Sequence[int]) -> str:
        texts = [f"{shown(self.names[k])} {one.p[k]:.4f}" for k in chosen]
        if self.thresholds is not None:
            ends = (f" (threshold {self.thresholds[k]:.4f})" for k in chosen)
            texts = [f"{text}{end}" for text, end in zip(texts, ends, strict=True)]
        return ", ".join(texts)
