"""The state of a review: the order of the images, the decisions, and what the page shows of them.

Several browsers, and other processes with the same file of corrections, may decide at once. Each decision names the
line that the browser knows as the last one about the image. If there is a later one, the decision is refused, and the
browser shows the image again.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.data.corrections import (
    EXCLUDED,
    WITHDRAWN,
    Correction,
    CorrectionsFile,
    join_labels,
    split_labels,
)
from finetune.data.data_set import DataSet
from finetune.review.doubts import Evidence, Order, order_images
from finetune.review.questions import BATCH, random_order
from finetune.review.ranking_job import ImageFacts, LabelsNow
from finetune.runs.intervals import interval
from finetune.system.file_names import composed
from finetune.system.messages import shown

NUM_NEIGHBOURS = 6
DECISIONS_TO_RANK = 20  # new decisions after which the labels are ranked again
_NUM_SUGGESTIONS = 9
_FEWEST_TO_ESTIMATE = 10  # random images from which an accuracy is shown

Action = Literal["change", "exclude", "right", "none"]


class Decision(NamedTuple):
    """The latest decision about an image.

    Attributes:
        action: What was decided: other labels, exclusion, or that the labels are right. `none` if nothing is decided.
        labels: Indices of the labels, ascending, if they are changed or right.
        line: Number of its line in the file, from 1; 0 if there is none.
    """

    action: Action = "none"
    labels: tuple[int, ...] = ()
    line: int = 0


class Conflict(Exception):
    """Someone else has decided about the image in the meantime."""


class ReviewSession:
    """The state of a review.

    Images that people have seen stay in their order. When labels are ranked again, only the others move.

    Args:
        images: The images.
        file: The file of corrections.
        by: Name of the person, for the file.
        mistakes: The mistakes of a run, as in `Evidence`.

    Attributes:
        has_several: Whether images have several labels.
        order: The images in order.
        version: Number of rankings so far.
        outdated: Set when enough decisions were made to rank the labels again.
    """

    def __init__(
        self,
        images: DataSet,
        file: CorrectionsFile,
        by: str,
        mistakes: dict[int, tuple[str, float]],
    ) -> None:
        self.images = images
        self.file = file
        self.by = by
        self.has_several = images.label_kind == "several"
        self.mistakes = mistakes
        self.version = 0
        self.outdated = threading.Event()
        self._index_of = {composed(name): i for i, name in enumerate(images.names())}
        self._class_of = {composed(name): k for k, name in enumerate(images.class_names)}
        self._decisions: dict[int, Decision] = {}  # of the lines that were parsed
        self._parsed: list[Correction] | None = None  # the list of `file` that they are in
        self._num_parsed = 0
        self._lock = threading.RLock()
        self._num_ranked = 0  # lines of the file that the last ranking knew
        self._is_shown = np.zeros(len(images), bool)  # by index
        self._last_shown: int | None = None
        self._probabilities: NDArray[np.float64] | None = None  # as in `Evidence`
        self._facts: ImageFacts | None = None
        self._accuracy = (0, 0, 0)  # as in `Evidence`
        self._refresh()
        labels = self.labels_now().labels
        questions = None if images.is_labelled else random_order(len(images))
        self._put_order(
            order_images(images, Evidence(labels, mistakes=mistakes, questions=questions))
        )

    def labels_now(self) -> LabelsNow:
        """Return the labels of all images as people have corrected them so far."""
        with self._lock:
            self._num_ranked = len(self.file.lines)
            labels = self.images.targets.labels.copy()
            is_kept = np.ones(len(labels), bool)
            is_skipped = self._is_shown.copy()
            if self._last_shown is not None:
                is_skipped[self._last_shown] = False  # people may still decide about it
            for i, decision in self._decisions.items():
                is_skipped[i] &= decision.action == "none"
                if decision.action == "exclude":
                    is_kept[i] = False
                elif decision.action == "change" and self.has_several:
                    labels[i] = 0
                    labels[i, list(decision.labels)] = 1
                elif decision.action == "change":
                    (labels[i],) = decision.labels
            return LabelsNow(labels, is_kept, is_skipped)

    def put_ranking(self, evidence: Evidence, facts: ImageFacts) -> None:
        """Put the images that nobody has seen into the order by what a job has computed."""
        order = order_images(self.images, replace(evidence, mistakes=self.mistakes))
        with self._lock:
            self._probabilities = evidence.probabilities
            self._accuracy = evidence.accuracy
            self._facts = facts
            self._put_order(order.after(self.order, self._is_shown))
            self.version += 1

    def state(self) -> dict[str, Any]:
        """Return what the page shows of the complete review."""
        with self._lock:
            self._refresh()
            return {
                "class_names": self.images.class_names,
                "has_several": self.has_several,
                "is_labelled": self.images.is_labelled,
                "has_splits": self.images.has_splits,
                "file": shown(self.file.path),
                "version": self.version,
                "counts": self._counts(),
                "first": int(self.order.images[0]),
                "next": self._next_after(-1),
            }

    def item(self, index: int) -> dict[str, Any]:
        """Return an image, which then keeps its place in the order.

        Raises:
            IndexError: There is no such image.
        """
        with self._lock:
            self._check(index)
            self._refresh()
            return self._shown_item(index)

    def decide(
        self, index: int, action: Action, labels: Sequence[int] | None, line: int
    ) -> dict[str, Any]:
        """Append a decision about an image to the file.

        Args:
            index: Index of the image.
            action: `none` withdraws earlier decisions.
            labels: Indices of the labels, for the action `change`.
            line: The line that the browser knows as the last one about the image.

        Returns:
            The image, and the counts.

        Raises:
            IndexError: There is no such image or label, or not the number of labels that an image has.
            Conflict: There is a later line about the image.
            OSError: The file cannot be written.
        """

        def check() -> None:
            self._read_lines()
            if self._decision(index).line != line:
                raise Conflict

        with self._lock:
            self._check(index)
            now = self._text_of(index, action, labels)
            self.file.refresh()
            check()  # before a file is made; the second time under its lock, for decisions of others in between
            was = self._text(self.images.labels_of(index))
            when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self.file.append(Correction(self.images.name(index), was, now, self.by, when), check)
            self._refresh()
            return {"item": self._shown_item(index), "counts": self._counts()}

    def _put_order(self, order: Order) -> None:
        self.order = order
        self._position_of = np.argsort(order.images)

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self.images):
            raise IndexError(index)

    # Decisions

    def _refresh(self) -> None:
        """Read the decisions of others. If many are new, mark the ranking as outdated."""
        self.file.refresh()
        self._read_lines()
        num_to_rank = DECISIONS_TO_RANK if self.images.is_labelled else BATCH
        if abs(len(self.file.lines) - self._num_ranked) >= num_to_rank:
            self.outdated.set()

    def _read_lines(self) -> None:
        """Parse the lines of the file that are new; all of them if others have changed it."""
        lines = self.file.lines
        if lines is not self._parsed:
            self._parsed = lines
            self._num_parsed = 0
            self._decisions = {}
        for number, line in enumerate(lines[self._num_parsed :], self._num_parsed + 1):
            i = self._index_of.get(composed(line.path))
            if i is not None:
                self._decisions[i] = self._parse(i, line.now, number)
        self._num_parsed = len(lines)

    def _decision(self, i: int) -> Decision:
        return self._decisions.get(i, Decision())

    def _labels_of(self, i: int) -> list[int]:
        """Return the labels of an image as people have corrected them."""
        decision = self._decision(i)
        return list(decision.labels) if decision.action == "change" else self.images.labels_of(i)

    def _parse(self, i: int, now: str, line: int) -> Decision:
        """Return the decision about an image from the text of `now`."""
        if now == EXCLUDED:
            return Decision("exclude", line=line)
        names = split_labels(now) if self.has_several else (composed(now),)
        # a class may be of an earlier state of the data set
        if now == WITHDRAWN or not self._class_of.keys() >= {*names}:
            return Decision(line=line)
        labels = sorted(self._class_of[name] for name in names)
        action: Action = "right" if labels == self.images.labels_of(i) else "change"
        return Decision(action, tuple(labels), line)

    def _text_of(self, i: int, action: Action, labels: Sequence[int] | None) -> str:
        """Return a decision as the column `now` of the file has it; `_parse` reads it.

        Raises:
            IndexError: There is no such label, or not the number of labels that an image has.
        """
        if action == "exclude":
            return EXCLUDED
        if action == "none":
            return WITHDRAWN
        if action == "right":
            return self._text(self.images.labels_of(i))
        num_classes = len(self.images.class_names)
        if labels is None or not all(0 <= k < num_classes for k in labels):
            raise IndexError(labels)
        if not self.has_several and len(labels) != 1:
            raise IndexError(labels)
        return self._text(sorted(set(labels)))

    def _text(self, labels: Sequence[int]) -> str:
        """Return labels as a file of corrections has them."""
        names = [self.images.class_names[k] for k in labels]
        return join_labels(names) if self.has_several else "".join(names)

    # What the page shows

    def _counts(self) -> dict[str, Any]:
        made = {i: d.action for i, d in self._decisions.items() if d.action != "none"}
        actions = Counter(made.values())
        of_class = Counter(k for d in self._decisions.values() for k in d.labels)
        return {
            "of_class": [of_class[k] for k in range(len(self.images.class_names))],
            "accuracy": self._accuracy_text(),
            "images": len(self.images),
            "doubtful": len(self.order.reasons),
            "doubtful_decided": len(made.keys() & self.order.reasons.keys()),
            "decided": len(made),
            "changed": actions["change"],
            "excluded": actions["exclude"],
            "right": actions["right"],
        }

    def _accuracy_text(self) -> str:
        """Return the expected accuracy with its interval; "" without labels to estimate it from."""
        num_right, num, num_asked = self._accuracy
        if num < _FEWEST_TO_ESTIMATE:
            return ""
        share = f"{100 * num_right / num:.0f} %"
        images = f"{num} random images"
        if num < num_asked:
            images = f"{num} of {num_asked} random images, without skipped and excluded ones"
        return f"{share} (95 % interval {interval(num_right, num)}, from {images})"

    def _shown_item(self, i: int) -> dict[str, Any]:
        self._is_shown[i] = True
        self._last_shown = i
        position = int(self._position_of[i])
        decision = self._decision(i)
        neighbours = self._neighbours(i)
        return {
            "version": self.version,
            "position": position,
            "index": i,
            "name": shown(self.images.name(i)),
            "split": self.images.split_name(i),
            "labels": self.images.labels_of(i),
            "action": decision.action,
            "chosen": list(decision.labels) if decision.action == "change" else None,
            "line": decision.line,
            "reason": shown(self.order.reasons.get(i, "")),
            "suggestions": self._suggestions(i, neighbours),
            "neighbours": [
                {
                    "index": j,
                    "labels": self._labels_of(j),
                    "is_excluded": self._decision(j).action == "exclude",
                }
                for j in neighbours
            ],
            "previous": self._at(position - 1),
            "following": self._at(position + 1),
            "next": self._next_after(position),
        }

    def _at(self, position: int) -> int | None:
        """Return the index of the image at a position; None if there is none."""
        return int(self.order.images[position]) if 0 <= position < len(self.images) else None

    def _next_after(self, position: int) -> int | None:
        """Return the first image after a position that has no decision; else the first of all; else None."""
        decided = [i for i, decision in self._decisions.items() if decision.action != "none"]
        open_positions = np.flatnonzero(~np.isin(self.order.images, decided))
        if not len(open_positions):
            return None
        after = open_positions[open_positions > position]
        return int(self.order.images[after[0] if len(after) else open_positions[0]])

    def _suggestions(self, i: int, neighbours: Sequence[int]) -> list[dict[str, Any]]:
        """Return the most probable classes of an image; without probabilities, those of its neighbours.

        The label of the image and that of its decision are among them, whatever their probability. If images have
        several labels, they are first.
        """
        num_classes = len(self.images.class_names)
        p = np.full(num_classes, np.nan) if self._probabilities is None else self._probabilities[i]
        own = list(dict.fromkeys([*self.images.labels_of(i), *self._labels_of(i)]))
        near = [k for j in neighbours for k in self._labels_of(j)]
        probable = np.argsort(-p, kind="stable")[: np.count_nonzero(~np.isnan(p))].tolist()
        first = own if self.has_several or not probable else []
        ranked = list(dict.fromkeys([*first, *probable, *near, *range(num_classes)]))
        chosen = ranked[:_NUM_SUGGESTIONS]
        if not self.has_several and (missing := [k for k in own if k not in chosen]):
            chosen[-len(missing) :] = missing
        return [
            {"class": k, "probability": None if np.isnan(p[k]) else round(float(p[k]), 4)}
            for k in chosen
        ]

    def _neighbours(self, i: int) -> list[int]:
        """Return the images with the most similar features, the most similar first; none without features."""
        if self._facts is None or self._facts.features is None:
            return []
        measured = self._facts.measured
        features = self._facts.features
        row = int(np.searchsorted(measured, i))
        if row == len(measured) or measured[row] != i:
            return []
        similarity: NDArray[np.float32] = features @ features[row]
        similarity[row] = -np.inf
        nearest = np.argsort(-similarity)[: min(NUM_NEIGHBOURS, len(measured) - 1)]
        return measured[nearest].tolist()
