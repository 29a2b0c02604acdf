"""Collects evidence of doubtful labels in a thread, while the page is open: copies, and out-of-fold probabilities.

Images are read once (`RankingJob.inspect`). When people have corrected labels, only the probabilities are computed
again, with these labels (`RankingJob.rank`). Of images without labels the job finds the next questions.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from finetune.data.checking.copies import connected, find_copies
from finetune.data.checking.image_facts import collect_facts, inspect_images
from finetune.data.data_set import DataSet
from finetune.features.image_features import FeatureNetwork, image_features
from finetune.features.label_errors import fold_groups, learnable_labels, out_of_fold
from finetune.features.logistic_regression import principal_coordinates
from finetune.review.doubts import Evidence
from finetune.review.questions import (
    TYPICAL_PER_CLASS,
    estimate,
    learn,
    most_useful,
    random_order,
    typical_images,
)
from finetune.system.messages import reason

_T = TypeVar("_T")


class LabelsNow(NamedTuple):
    """The labels of N images.

    Attributes:
        labels: Class index of each image, (N,). If images have several labels, (N, K), 0 or 1.
        is_kept: Which images are not excluded, (N,).
        is_skipped: Which images people have seen and left undecided, (N,).
    """

    labels: NDArray[np.integer]
    is_kept: NDArray[np.bool_]
    is_skipped: NDArray[np.bool_]

    def equals(self, other: "LabelsNow") -> bool:
        """Return whether the same images have the same labels, whatever people have skipped."""
        is_same = np.array_equal(self.labels, other.labels)
        return is_same and np.array_equal(self.is_kept, other.is_kept)


@dataclass(frozen=True)
class ImageFacts:
    """What is computed from the pixels of N images. It does not depend on their labels.

    Attributes:
        copies: Pairs of images that show the same photograph.
        errors: Why an image cannot be decoded.
        measured: Indices of the images that have features, ascending, (M,).
        coordinates: Features of these images along their principal axes, (M, R); None without a network.
        features: Their features with a mean of 0 and a norm of 1, (M, D); None without a network.
        typical: If they have no labels, the indices into `measured` of those that represent the others.
    """

    copies: list[tuple[int, int]]
    errors: dict[int, str]
    measured: NDArray[np.int64]
    coordinates: NDArray[np.float64] | None = None
    features: NDArray[np.float32] | None = None
    typical: NDArray[np.int64] = field(default_factory=lambda: np.arange(0))


class RankingJob(threading.Thread):
    """Computes what is known about the labels of a data set, and computes it again when labels have changed.

    It ends with the process, or at an error.

    Args:
        data: The images.
        labels_now: Returns their labels. The job calls it before each ranking.
        network: The network; None to look for copies only.
        on_ready: Called in the thread with each result.
        outdated: Set by others when the result is outdated.

    Attributes:
        done: Number of steps so far: an image that was read, or whose features were computed.
        total: Number of all steps, at most.
        error: Why the job has ended early; "" if it has not.
    """

    def __init__(
        self,
        data: DataSet,
        labels_now: Callable[[], LabelsNow],
        network: FeatureNetwork | None,
        on_ready: Callable[[Evidence, ImageFacts], None],
        outdated: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self.data = data
        self.labels_now = labels_now
        self.network = network
        self.on_ready = on_ready
        self.outdated = outdated
        self.error = ""
        self.done = 0
        self.total = len(self.data.paths) * (1 if network is None else 2)
        self.facts: ImageFacts | None = None
        self._ranked_by: LabelsNow | None = None

    def run(self) -> None:
        self.rank()
        while not self.error:
            self.outdated.wait()
            self.outdated.clear()
            self.rank()

    def rank(self) -> None:
        """Rank the labels as they are now, unless they have not changed since the last time."""
        try:
            if self.facts is None:
                self.facts = self.inspect()
            now = self.labels_now()
            if self._ranked_by is None or not now.equals(self._ranked_by):
                self.on_ready(self._evidence(self.facts, now), self.facts)
                self._ranked_by = now
        except Exception as error:  # of any decoder or network: the page works without a ranking
            self.error = reason(error) or type(error).__name__

    def _counted(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items, and count them in `done`."""
        for item in items:
            yield item
            self.done += 1

    def inspect(self) -> ImageFacts:
        """Read all images: find copies and unreadable files, and compute features if there is a network."""
        paths = self.data.paths
        is_kept = self.labels_now().is_kept
        facts = collect_facts(self._counted(inspect_images(paths)), len(paths))
        copies = find_copies(facts, is_kept)
        measured = copies.distinct
        coordinates = unit = None
        typical = np.arange(0)
        if self.network is not None and len(measured) > 1:
            computed = self._counted(
                image_features(
                    self.network.features,
                    [paths[int(i)] for i in measured],
                    self.network.preparation,
                )
            )
            features = np.stack(list(computed))
            unit = _unit(features)
            coordinates = principal_coordinates(features.astype(np.float64))
            if not self.data.is_labelled:
                typical = typical_images(unit, TYPICAL_PER_CLASS * len(self.data.class_names))
        pairs = [(int(pair.i), int(pair.j)) for pair in copies.near] + copies.repeated()
        errors = {
            index: facts.errors[index]
            for index in np.flatnonzero(~facts.is_readable & is_kept).tolist()
        }
        return ImageFacts(pairs, errors, measured, coordinates, unit, typical)

    def _evidence(self, facts: ImageFacts, now: LabelsNow) -> Evidence:
        """Return the evidence with these labels. Excluded images are no part of it."""
        if not self.data.is_labelled:
            return self._questions(facts, now)
        sets = connected(facts.copies, len(self.data))
        remaining = [[i for i in members if now.is_kept[i]] for members in sets]
        return Evidence(
            now.labels,
            self._probabilities(facts, now),
            copies=[members for members in remaining if len(members) > 1],
            errors={i: error for i, error in facts.errors.items() if now.is_kept[i]},
        )

    def _questions(self, facts: ImageFacts, now: LabelsNow) -> Evidence:
        """Return the order of questions about images without labels: one at random, then the most useful ones.

        Answered and skipped images come before them. Those without features, which are copies or cannot be decoded,
        come last.
        """
        num = len(self.data)
        num_classes = len(self.data.class_names)
        measured = facts.measured
        is_open = now.is_kept & (now.labels < 0) & ~now.is_skipped
        at_random = random_order(num)
        at_random = at_random[np.argsort(~np.isin(at_random, measured), kind="stable")]
        probabilities = np.full((num, num_classes), np.nan)
        is_right = np.full(num, np.nan)
        useful = measured[facts.typical]
        answers = np.where(now.is_kept, now.labels, -1)[measured]
        has_answers = len(np.unique(answers[answers >= 0])) > 1
        if facts.coordinates is not None and has_answers:
            probabilities[measured], is_right[measured] = learn(
                facts.coordinates, answers, num_classes
            )
            useful = measured[most_useful(facts.typical, probabilities[measured])]
        asked = at_random[~is_open[at_random]]
        rest = at_random[is_open[at_random]]
        order = np.concatenate([asked, rest[:1], useful, rest])
        _, first = np.unique(order, return_index=True)  # of each image its first place counts
        return Evidence(
            now.labels,
            probabilities,
            questions=order[np.sort(first)],
            accuracy=estimate(is_right[at_random], is_open[at_random]),
        )

    def _probabilities(self, facts: ImageFacts, now: LabelsNow) -> NDArray[np.float64] | None:
        """Return the out-of-fold probabilities of all images, (N, K).

        They are NaN for images without features, excluded images, and classes that a head cannot learn in every fold,
        because they have fewer groups than there are folds.
        """
        if facts.coordinates is None:
            return None
        rows = np.flatnonzero(now.is_kept[facts.measured])
        chosen = facts.measured[rows]
        labels = now.labels[chosen]
        if len(np.unique(labels, axis=0)) < 2:
            return None
        num = len(self.data.paths)
        groups = fold_groups(self.data, facts.copies)
        num_classes = len(self.data.class_names)
        probabilities = np.full((num, num_classes), np.nan)
        probabilities[chosen] = out_of_fold(
            facts.coordinates[rows], labels, groups[chosen], num_classes
        )
        is_learnable = learnable_labels(labels, groups[chosen], num_classes)
        if labels.ndim == 2:
            probabilities[:, ~is_learnable] = np.nan
        else:
            probabilities[chosen[~is_learnable[labels]]] = np.nan
        return probabilities


def _unit(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return features for cosine similarity, (M, D): with a mean of 0 and a norm of 1."""
    centred = features - features.mean(axis=0)
    norms = np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    return np.asarray(centred / norms, np.float32)
