"""The state of a review: the order of the images, and the decisions in the file of corrections.

Several browsers, and other processes with the same file, may decide at once. Each decision names the line that the
browser knows as the last one about the image. If there is a later one, the decision is refused, and the browser shows
the image again.
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
from finetune.review.ranking_job import LabelsNow, Ranked
from finetune.system.file_names import composed
from finetune.system.messages import shown

NUM_NEIGHBOURS = 6
DECISIONS_TO_RANK = 20  # new decisions after which the labels are ranked again
_NUM_SUGGESTIONS = 9
_NO_NEIGHBOUR = -2.0  # below any cosine similarity
Action = Literal["change", "exclude", "right", "none"]
NO_LINE = 0  # lines are counted from 1


class Decision(NamedTuple):
    """The latest decision about an image.

    Attributes:
        action: What was decided: other labels, exclusion, or that the labels are right. `none` if nothing is decided.
        labels: Indices of the labels, ascending, if they are changed or right.
        line: Number of its line in the file, from 1; 0 if there is none.
    """

    action: Action = "none"
    labels: tuple[int, ...] = ()
    line: int = NO_LINE


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
        index_of: The index of each image by its name in composed Unicode.
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
        self.has_several = images.label_kind == "several"
        self.index_of = {composed(name): i for i, name in enumerate(images.names())}
        self.file = file
        self.by = by
        self.mistakes = mistakes
        self.version = 0  # of the order
        self.outdated = threading.Event()
        self._index_of_class = {composed(name): k for k, name in enumerate(images.class_names)}
        self._lock = threading.RLock()
        self._lines = file.lines
        self._num_read = 0  # lines of the file that `_decisions` includes
        self._num_ranked = 0  # those that the last ranking knew
        self._decisions: dict[int, Decision] = {}
        self._is_decided = np.zeros(len(images), bool)  # by index
        self._is_shown = np.zeros(len(images), bool)  # by index
        self._ranked: Ranked | None = None
        self._has_features: NDArray[np.bool_] = np.zeros(len(images), bool)
        self._sync()
        evidence = Evidence(self.labels_now().labels, mistakes=mistakes)
        self._put_order(order_images(images, evidence))

    def labels_now(self) -> LabelsNow:
        """Return the labels by the decisions so far."""
        with self._lock:
            self._num_ranked = self._num_read
            labels = self.images.targets.labels.copy()
            is_kept = np.ones(len(labels), bool)
            for i, decision in self._decisions.items():
                if decision.action == "exclude":
                    is_kept[i] = False
                elif decision.action == "change" and self.has_several:
                    labels[i] = 0
                    labels[i, list(decision.labels)] = 1
                elif decision.action == "change":
                    labels[i] = decision.labels[0]
            return LabelsNow(labels, is_kept)

    def put_ranking(self, ranked: Ranked) -> None:
        """Put the images that nobody has seen into the order of a ranking."""
        evidence = replace(ranked.evidence, mistakes=self.mistakes)
        order = order_images(self.images, evidence)
        with self._lock:
            self._ranked = ranked
            if ranked.features is not None:
                self._has_features = np.any(ranked.features != 0, axis=1)
            self._put_order(order.after(self.order, self._is_shown))
            self.version += 1

    def _put_order(self, order: Order) -> None:
        """Set the order, and what is derived from it."""
        self.order = order
        self._position_of = np.empty(len(order.images), np.int64)
        self._position_of[order.images] = np.arange(len(order.images))
        self._doubtful = np.array(list(order.reasons), np.int64)

    def _sync(self) -> None:
        """Read the decisions that other processes have made."""
        self.file.refresh()
        self._read_lines()

    def _read_lines(self) -> None:
        """Add the decisions in new lines of the file. If they are many, mark the ranking as outdated."""
        lines = self.file.lines
        if lines is not self._lines:  # the file has been replaced
            self._decisions = {}
            self._is_decided[:] = False
            self._num_read = 0
        for number, line in enumerate(lines[self._num_read :], self._num_read + 1):
            i = self.index_of.get(composed(line.path))
            if i is not None:
                self._decisions[i] = self._parse(i, line.now, number)
                self._is_decided[i] = self._decisions[i].action != "none"
        self._lines = lines
        self._num_read = len(lines)
        if abs(self._num_read - self._num_ranked) >= DECISIONS_TO_RANK:
            self.outdated.set()

    def _parse(self, i: int, now: str, line: int) -> Decision:
        """Return the decision about an image from the text of `now`."""
        if now == EXCLUDED:
            return Decision("exclude", line=line)
        names = split_labels(now) if self.has_several else (composed(now),)
        numbers = [self._index_of_class.get(name) for name in names]
        # withdrawn, or with a class of an earlier state of the data set
        if now == WITHDRAWN or None in numbers:
            return Decision(line=line)
        labels = sorted(number for number in numbers if number is not None)
        action: Action = "right" if labels == self.images.labels_of(i) else "change"
        return Decision(action, tuple(labels), line)

    def state(self) -> dict[str, Any]:
        """Return what the page shows of the complete review."""
        with self._lock:
            self._sync()
            return {
                "class_names": self.images.class_names,
                "has_several": self.has_several,
                "has_splits": self.images.has_splits,
                "file": shown(self.file.path),
                "version": self.version,
                "counts": self._counts(),
                "first": int(self.order.images[0]),
                "next": self._next_after(-1),
            }

    def _counts(self) -> dict[str, int]:
        actions = Counter(decision.action for decision in self._decisions.values())
        return {
            "images": len(self.images),
            "doubtful": len(self._doubtful),
            "doubtful_decided": int(np.count_nonzero(self._is_decided[self._doubtful])),
            "decided": int(np.count_nonzero(self._is_decided)),
            "changed": actions["change"],
            "excluded": actions["exclude"],
            "right": actions["right"],
        }

    def item(self, index: int) -> dict[str, Any]:
        """Return an image, which then keeps its place in the order.

        Raises:
            IndexError: There is no such image.
        """
        with self._lock:
            self._check(index)
            self._sync()
            self._is_shown[index] = True
            return self._item(index)

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self.images):
            raise IndexError(index)

    def _item(self, i: int) -> dict[str, Any]:
        position = int(self._position_of[i])
        decision = self._decisions.get(i, Decision())
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
            "suggestions": self._suggestions(i),
            "neighbours": [self._neighbour(j) for j in self._neighbours(i)],
            "previous": self._at(position - 1),
            "following": self._at(position + 1),
            "next": self._next_after(position),
        }

    def _at(self, position: int) -> int | None:
        """Return the index of the image at a position; None if there is none."""
        return int(self.order.images[position]) if 0 <= position < len(self.images) else None

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
        with self._lock:
            self._check(index)
            now = self._text_of_decision(index, action, labels)
            self._sync()
            if self._decisions.get(index, Decision()).line != line:
                raise Conflict
            was = self._text(self.images.labels_of(index))
            when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self.file.append(Correction(self.images.name(index), was, now, self.by, when))
            self._read_lines()
            self._is_shown[index] = True
            return {"item": self._item(index), "counts": self._counts()}

    def _text_of_decision(self, index: int, action: Action, labels: Sequence[int] | None) -> str:
        """Return a decision as the column `now` of the file has it; `_parse` reads it.

        Raises:
            IndexError: There is no such label, or not the number of labels that an image has.
        """
        if action == "exclude":
            return EXCLUDED
        if action == "none":
            return WITHDRAWN
        if action == "right":
            return self._text(self.images.labels_of(index))
        num_classes = len(self.images.class_names)
        if labels is None or not all(0 <= k < num_classes for k in labels):
            raise IndexError(labels)
        if not self.has_several and len(labels) != 1:
            raise IndexError(labels)
        return self._text(sorted(set(labels)))

    def _text(self, labels: Sequence[int]) -> str:
        """Return labels as a file of corrections has them."""
        names = [self.images.class_names[k] for k in labels]
        return join_labels(names) if self.has_several else names[0]

    def _next_after(self, position: int) -> int | None:
        """Return the first image after a position that has no decision; else the first of all; else None."""
        is_open = ~self._is_decided[self.order.images]
        if not is_open.any():
            return None
        after = is_open[position + 1 :]
        following = position + 1 + int(after.argmax()) if after.any() else int(is_open.argmax())
        return int(self.order.images[following])

    def _suggestions(self, i: int) -> list[dict[str, Any]]:
        """Return the most probable classes of an image; without probabilities, those of its neighbours.

        The label of the image and that of its decision are among them, whatever their probability. If images have
        several labels, they are first.
        """
        own = list(dict.fromkeys([*self.images.labels_of(i), *self._labels_by_decision(i)]))
        evidence = None if self._ranked is None else self._ranked.evidence
        if evidence is None or evidence.probabilities is None:
            probability = np.full(len(self.images.class_names), np.nan)
        else:
            probability = evidence.probabilities[i]
        near = [k for j in self._neighbours(i) for k in self._labels_by_decision(j)]
        # NaN is last
        probable = np.argsort(-probability, kind="stable")[: int((~np.isnan(probability)).sum())]
        first = own if self.has_several or not len(probable) else []
        order = dict.fromkeys(
            [*first, *probable.tolist(), *near, *range(len(self.images.class_names))]
        )
        chosen = list(order)[:_NUM_SUGGESTIONS]
        if not self.has_several and (missing := [k for k in own if k not in chosen]):
            chosen[-len(missing) :] = missing
        rounded = [
            None if np.isnan(probability[k]) else round(float(probability[k]), 4) for k in chosen
        ]
        return [
            {"class": k, "probability": value} for k, value in zip(chosen, rounded, strict=True)
        ]

    def _neighbours(self, i: int) -> Sequence[int]:
        """Return the images with the most similar features, the most similar first; none without features."""
        features = None if self._ranked is None else self._ranked.features
        if features is None or not self._has_features[i]:
            return []
        similarity = features @ features[i]
        similarity[i] = _NO_NEIGHBOUR
        similarity[~self._has_features] = _NO_NEIGHBOUR
        num = min(NUM_NEIGHBOURS, len(similarity) - 1)
        nearest = np.argpartition(-similarity, num - 1)[:num] if num > 0 else np.zeros(0, np.int64)
        ordered = nearest[np.argsort(-similarity[nearest])]
        return [int(j) for j in ordered if similarity[j] > _NO_NEIGHBOUR]

    def _labels_by_decision(self, j: int) -> list[int]:
        """Return the labels of an image as people have corrected them."""
        decision = self._decisions.get(j, Decision())
        return list(decision.labels) if decision.action == "change" else self.images.labels_of(j)

    def _neighbour(self, j: int) -> dict[str, Any]:
        is_excluded = self._decisions.get(j, Decision()).action == "exclude"
        return {"index": j, "labels": self._labels_by_decision(j), "is_excluded": is_excluded}
