"""The state of a review: the order of the images, the decisions, and what the page shows of them."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.corrections import CorrectionsFile
from finetune.data.data_set import DataSet
from finetune.review.decisions import Action, Decisions
from finetune.review.doubts import Evidence, Order, order_images
from finetune.review.ranking_job import ImageFacts, LabelsNow
from finetune.system.messages import shown

NUM_NEIGHBOURS = 6
DECISIONS_TO_RANK = 20  # new decisions after which the labels are ranked again
_NUM_SUGGESTIONS = 9


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
        self.has_several = images.label_kind == "several"
        self.mistakes = mistakes
        self.version = 0
        self.outdated = threading.Event()
        self._decisions = Decisions(images, file, by)
        self._lock = threading.RLock()
        self._num_ranked = 0  # lines of the file that the last ranking knew
        self._is_shown = np.zeros(len(images), bool)  # by index
        self._probabilities: NDArray[np.float64] | None = None  # as in `Evidence`
        self._facts: ImageFacts | None = None
        self._put_order(order_images(images, Evidence(self.labels_now().labels, mistakes=mistakes)))

    def labels_now(self) -> LabelsNow:
        """Return the labels by the decisions so far."""
        with self._lock:
            self._num_ranked = self._decisions.num_lines
            return self._decisions.labels_now()

    def put_ranking(self, evidence: Evidence, facts: ImageFacts) -> None:
        """Put the images that nobody has seen into the order by what a job has computed."""
        order = order_images(self.images, replace(evidence, mistakes=self.mistakes))
        with self._lock:
            self._probabilities = evidence.probabilities
            self._facts = facts
            self._put_order(order.after(self.order, self._is_shown))
            self.version += 1

    def _put_order(self, order: Order) -> None:
        self.order = order
        self._position_of = np.argsort(order.images)

    def _refresh(self) -> None:
        """Read the decisions of others. If many are new, mark the ranking as outdated."""
        self._decisions.refresh()
        if abs(self._decisions.num_lines - self._num_ranked) >= DECISIONS_TO_RANK:
            self.outdated.set()

    def state(self) -> dict[str, Any]:
        """Return what the page shows of the complete review."""
        with self._lock:
            self._refresh()
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
        made = self._decisions.made()
        actions = Counter(made.values())
        return {
            "images": len(self.images),
            "doubtful": len(self.order.reasons),
            "doubtful_decided": len(made.keys() & self.order.reasons.keys()),
            "decided": len(made),
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
        with self._lock:
            self._check(index)
            self._decisions.add(index, action, labels, line)
            self._refresh()
            return {"item": self._shown_item(index), "counts": self._counts()}

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self.images):
            raise IndexError(index)

    def _shown_item(self, i: int) -> dict[str, Any]:
        self._is_shown[i] = True
        position = int(self._position_of[i])
        decision = self._decisions.of(i)
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
            "neighbours": [self._neighbour(j) for j in neighbours],
            "previous": self._at(position - 1),
            "following": self._at(position + 1),
            "next": self._next_after(position),
        }

    def _at(self, position: int) -> int | None:
        """Return the index of the image at a position; None if there is none."""
        return int(self.order.images[position]) if 0 <= position < len(self.images) else None

    def _next_after(self, position: int) -> int | None:
        """Return the first image after a position that has no decision; else the first of all; else None."""
        decided = list(self._decisions.made())
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
        p = np.full(num_classes, np.nan)
        if self._probabilities is not None:
            p = self._probabilities[i]
        own = list(dict.fromkeys([*self.images.labels_of(i), *self._decisions.labels_of(i)]))
        near = [k for j in neighbours for k in self._decisions.labels_of(j)]
        probable = np.argsort(-p, kind="stable")[: np.count_nonzero(~np.isnan(p))].tolist()
        first = own if self.has_several or not probable else []
        chosen = list(dict.fromkeys([*first, *probable, *near, *range(num_classes)]))
        chosen = chosen[:_NUM_SUGGESTIONS]
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

    def _neighbour(self, j: int) -> dict[str, Any]:
        is_excluded = self._decisions.of(j).action == "exclude"
        return {"index": j, "labels": self._decisions.labels_of(j), "is_excluded": is_excluded}
