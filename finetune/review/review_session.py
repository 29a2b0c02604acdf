"""The state of a review: the order of the images, and the decisions in the file of corrections.

Several browsers, and other processes with the same file, may decide at once. Each decision names the line that the
browser knows as the last one about the image. If there is a later one, the decision is refused, and the browser shows
the image again.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.data.corrections import EXCLUDED, WITHDRAWN, Correction, CorrectionsFile
from finetune.review.doubts import Evidence, Order, order_images
from finetune.review.ranking_job import Labelled, Ranked
from finetune.review.review_images import ReviewImages
from finetune.system.file_names import composed
from finetune.system.messages import shown

NUM_NEIGHBOURS = 6
_NUM_SUGGESTIONS = 9
Action = Literal["class", "exclude", "right", "none"]
NO_LINE = 0


class Decision(NamedTuple):
    """The last decision about an image.

    Attributes:
        now: The class, `excluded`, or "" if there is no decision.
        line: Number of its line in the file, from 1; 0 if there is none.
    """

    now: str = WITHDRAWN
    line: int = NO_LINE


class Conflict(Exception):
    """Somebody else has decided about the image in the meantime."""


class ReviewSession:
    """The state of a review.

    Args:
        images: The images.
        file: The file of corrections.
        by: Name of the person, for the file.
        mistakes: The mistakes of a run, as in `Evidence`.
    """

    def __init__(
        self,
        images: ReviewImages,
        file: CorrectionsFile,
        by: str,
        mistakes: dict[int, tuple[int, float]],
    ) -> None:
        self.images = images
        self.file = file
        self.by = by
        self.version = 0  # of the order
        self._number = {composed(name): k for k, name in enumerate(images.class_names)}
        self._lock = threading.RLock()
        self._lines = file.lines
        self._num_taken = 0
        self._decisions: dict[int, Decision] = {}
        self._is_decided = np.zeros(len(images), bool)  # by index
        self._ranked: Ranked | None = None
        self._has_features: NDArray[np.bool_] = np.zeros(len(images), bool)
        self._sync()
        self.at_start = Labelled(images.listing, *self._labels_now())
        self._put_order(
            order_images(images.listing, Evidence(self.at_start.labels, mistakes=mistakes))
        )

    def _labels_now(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the class index of each image now, (N,), and which images are not excluded, (N,)."""
        labels = self.images.listing.class_of.astype(np.int64)
        is_kept = np.ones(len(labels), bool)
        for i, decision in self._decisions.items():
            if decision.now == EXCLUDED:
                is_kept[i] = False
            elif (number := self._number.get(composed(decision.now))) is not None:
                labels[i] = number
        return labels, is_kept

    def put_ranking(self, ranked: Ranked) -> None:
        """Put the images into the order of a ranking."""
        order = order_images(self.images.listing, ranked.evidence)
        with self._lock:
            self._ranked = ranked
            if ranked.features is not None:
                self._has_features = np.any(ranked.features != 0, axis=1)
            self._put_order(order)
            self.version += 1

    def _put_order(self, order: Order) -> None:
        self.order = order
        self._position_of = np.empty(len(order.images), np.int64)
        self._position_of[order.images] = np.arange(len(order.images))

    def _sync(self) -> None:
        """Read the decisions that other processes have made."""
        self.file.refresh()
        self._take_lines()

    def _take_lines(self) -> None:
        lines = self.file.lines
        if lines is not self._lines:  # the file has been replaced
            self._decisions = {}
            self._is_decided[:] = False
            self._num_taken = 0
        for number, line in enumerate(lines[self._num_taken :], self._num_taken + 1):
            i = self.images.index_of.get(composed(line.path))
            if i is not None:
                self._decisions[i] = Decision(line.now, number)
                is_known = line.now == EXCLUDED or composed(line.now) in self._number
                self._is_decided[i] = is_known
        self._lines = lines
        self._num_taken = len(lines)

    def state(self) -> dict[str, Any]:
        """Return what the page shows of the complete review."""
        with self._lock:
            self._sync()
            return {
                "class_names": self.images.class_names,
                "has_splits": len(self.images.listing.splits) > 1,
                "file": shown(self.file.path),
                "version": self.version,
                "counts": self._counts(),
                "next": self._next_after(-1),
            }

    def _counts(self) -> dict[str, int]:
        kinds = Counter(self._action(i)[0] for i in self._decisions)
        doubtful = self.order.num_doubtful
        is_decided = self._is_decided[self.order.images]
        return {
            "images": len(self.images),
            "doubtful": doubtful,
            "doubtful_decided": int(np.count_nonzero(is_decided[:doubtful])),
            "decided": int(np.count_nonzero(is_decided)),
            "changed": kinds["class"],
            "excluded": kinds["exclude"],
            "right": kinds["right"],
        }

    def item(self, position: int) -> dict[str, Any]:
        """Return the image at a position of the order.

        Raises:
            IndexError: There is no such position.
        """
        with self._lock:
            self._sync()
            return self._item(position)

    def _item(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self.images):
            raise IndexError(position)
        i = int(self.order.images[position])
        action, number = self._action(i)
        listing = self.images.listing
        return {
            "version": self.version,
            "position": position,
            "index": i,
            "name": shown(self.images.names[i]),
            "split": listing.splits[int(listing.split_of[i])],
            "label": int(listing.class_of[i]),
            "action": action,
            "class": number,
            "line": self._decisions.get(i, Decision()).line,
            "reason": shown(self.order.reasons.get(i, "")),
            "suggestions": self._suggestions(i),
            "neighbours": [self._neighbour(j) for j in self._neighbours(i)],
            "next": self._next_after(position),
        }

    def decide(self, index: int, action: Action, number: int | None, line: int) -> dict[str, Any]:
        """Append a decision about an image to the file.

        Args:
            index: Index of the image.
            action: `none` withdraws earlier decisions.
            number: Index of the class, for the action `class`.
            line: The line that the browser knows as the last one about the image.

        Returns:
            The image, and the counts.

        Raises:
            IndexError: There is no such image or class.
            Conflict: There is a later line about the image.
            OSError: The file cannot be written.
        """
        with self._lock:
            now = self._now(index, action, number)
            self._sync()
            if self._decisions.get(index, Decision()).line != line:
                raise Conflict
            was = self.images.class_names[int(self.images.listing.class_of[index])]
            when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self.file.append(Correction(self.images.names[index], was, now, self.by, when))
            self._take_lines()
            item = self._item(int(self._position_of[index]))
            return {"item": item, "counts": self._counts()}

    def _now(self, index: int, action: Action, number: int | None) -> str:
        if not 0 <= index < len(self.images):
            raise IndexError(index)
        if action == "exclude":
            return EXCLUDED
        if action == "none":
            return WITHDRAWN
        if action == "right":
            return self.images.class_names[int(self.images.listing.class_of[index])]
        if number is None or not 0 <= number < len(self.images.class_names):
            raise IndexError(number)
        return self.images.class_names[number]

    def _action(self, i: int) -> tuple[Action, int | None]:
        """Return the decision about an image, and the index of the class if it is one."""
        now = self._decisions.get(i, Decision()).now
        if now == WITHDRAWN:
            return "none", None
        if now == EXCLUDED:
            return "exclude", None
        number = self._number.get(composed(now))
        if number is None:  # of an earlier state of the data set
            return "none", None
        return ("right", None) if number == self.images.listing.class_of[i] else ("class", number)

    def _next_after(self, position: int) -> int | None:
        """Return the first position after this one whose image has no decision; else the first of all; else None."""
        is_open = ~self._is_decided[self.order.images]
        if not is_open.any():
            return None
        after = is_open[position + 1 :]
        return position + 1 + int(after.argmax()) if after.any() else int(is_open.argmax())

    def _suggestions(self, i: int) -> list[dict[str, Any]]:
        """Return the most probable classes of an image; without probabilities, those of its neighbours."""
        probabilities = None if self._ranked is None else self._ranked.evidence.probabilities
        if probabilities is not None and not np.isnan(probabilities[i]).any():
            order = np.argsort(-probabilities[i], kind="stable")[:_NUM_SUGGESTIONS].tolist()
            return [
                {"class": k, "probability": round(float(probabilities[i, k]), 4)} for k in order
            ]
        near = [self._neighbour(j)["label"] for j in self._neighbours(i)]
        own = int(self.images.listing.class_of[i])
        order = dict.fromkeys([own, *near, *range(len(self.images.class_names))])
        return [{"class": k, "probability": None} for k in list(order)[:_NUM_SUGGESTIONS]]

    def _neighbours(self, i: int) -> Sequence[int]:
        features = None if self._ranked is None else self._ranked.features
        if features is None or not self._has_features[i]:
            return []
        alike = features @ features[i]
        alike[i] = -2
        alike[~self._has_features] = -2
        num = min(NUM_NEIGHBOURS, len(alike) - 1)
        nearest = np.argpartition(-alike, num - 1)[:num] if num > 0 else np.zeros(0, np.int64)
        return [int(j) for j in nearest[np.argsort(-alike[nearest])] if alike[j] > -2]

    def _neighbour(self, j: int) -> dict[str, Any]:
        action, number = self._action(j)
        label = int(self.images.listing.class_of[j]) if number is None else number
        return {"index": j, "label": label, "is_excluded": action == "exclude"}
