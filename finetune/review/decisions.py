"""The decisions of a review, as the file of corrections has them.

Several browsers, and other processes with the same file, may decide at once. Each decision names the line that the
browser knows as the last one about the image. If there is a later one, the decision is refused, and the browser shows
the image again.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import numpy as np

from finetune.data.corrections import (
    EXCLUDED,
    WITHDRAWN,
    Correction,
    CorrectionsFile,
    join_labels,
    split_labels,
)
from finetune.data.data_set import DataSet
from finetune.review.ranking_job import LabelsNow
from finetune.system.file_names import composed

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


class Decisions:
    """The latest decision about each image.

    Args:
        images: The images.
        file: The file of corrections.
        by: Name of the person, for the file.

    Attributes:
        num_lines: Lines of the file that the decisions include.
    """

    def __init__(self, images: DataSet, file: CorrectionsFile, by: str) -> None:
        self.images = images
        self.file = file
        self.by = by
        self.num_lines = 0
        self._has_several = images.label_kind == "several"
        self._index_of = {composed(name): i for i, name in enumerate(images.names())}
        self._index_of_class = {composed(name): k for k, name in enumerate(images.class_names)}
        self._lines = file.lines
        self._of_image: dict[int, Decision] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the decisions that other processes have made.

        Raises:
            ValueError: A line of the file is not valid.
            OSError: The file cannot be read.
        """
        self.file.refresh()
        self._read_new_lines()

    def of(self, i: int) -> Decision:
        """Return the decision about an image."""
        return self._of_image.get(i, Decision())

    def labels_of(self, i: int) -> list[int]:
        """Return the labels of an image as people have corrected them."""
        decision = self.of(i)
        return list(decision.labels) if decision.action == "change" else self.images.labels_of(i)

    def made(self) -> dict[int, Action]:
        """Return what is decided about each image; images without a decision are absent."""
        return {i: d.action for i, d in self._of_image.items() if d.action != "none"}

    def labels_now(self) -> LabelsNow:
        """Return the labels of all images as people have corrected them."""
        labels = self.images.targets.labels.copy()
        is_kept = np.ones(len(labels), bool)
        for i, action in self.made().items():
            if action == "exclude":
                is_kept[i] = False
            elif self._has_several:
                labels[i] = 0
                labels[i, self.labels_of(i)] = 1
            else:
                labels[i] = self.labels_of(i)[0]
        return LabelsNow(labels, is_kept)

    def add(self, i: int, action: Action, labels: Sequence[int] | None, line: int) -> None:
        """Append a decision to the file; the arguments are those of `ReviewSession.decide`, which names the errors."""

        def check() -> None:
            self._read_new_lines()
            if self.of(i).line != line:
                raise Conflict

        now = self._text_of_decision(i, action, labels)
        self.file.refresh()
        check()  # before a file is made; the second time under its lock, for decisions of others in between
        was = self._text(self.images.labels_of(i))
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.file.append(Correction(self.images.name(i), was, now, self.by, when), check)
        self._read_new_lines()

    def _read_new_lines(self) -> None:
        if self.file.lines is not self._lines:  # the file has been replaced
            self._lines = self.file.lines
            self._of_image = {}
            self.num_lines = 0
        new = self._lines[self.num_lines :]
        for number, line in enumerate(new, self.num_lines + 1):
            i = self._index_of.get(composed(line.path))
            if i is not None:
                self._of_image[i] = self._parse(i, line.now, number)
        self.num_lines = len(self._lines)

    def _parse(self, i: int, now: str, line: int) -> Decision:
        """Return the decision about an image from the text of `now`."""
        if now == EXCLUDED:
            return Decision("exclude", line=line)
        names = split_labels(now) if self._has_several else (composed(now),)
        numbers = [self._index_of_class.get(name) for name in names]
        # withdrawn, or with a class of an earlier state of the data set
        if now == WITHDRAWN or None in numbers:
            return Decision(line=line)
        labels = sorted(number for number in numbers if number is not None)
        action: Action = "right" if labels == self.images.labels_of(i) else "change"
        return Decision(action, tuple(labels), line)

    def _text_of_decision(self, i: int, action: Action, labels: Sequence[int] | None) -> str:
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
        if not self._has_several and len(labels) != 1:
            raise IndexError(labels)
        return self._text(sorted(set(labels)))

    def _text(self, labels: Sequence[int]) -> str:
        """Return labels as a file of corrections has them."""
        names = [self.images.class_names[k] for k in labels]
        return join_labels(names) if self._has_several else names[0]
