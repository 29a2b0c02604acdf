"""Looks for doubtful labels in a thread, while the page is open: by copies, and by out-of-fold probabilities."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from finetune.data.checking.duplicates import connected, is_blank, larger_crops, near_duplicates
from finetune.data.checking.exact_duplicates import equal_files
from finetune.data.checking.picture_facts import collect_facts, inspect_images
from finetune.data.datasets.listing import Listing
from finetune.features.label_errors import neighbours, out_of_fold
from finetune.features.logistic_regression import NUM_FOLDS
from finetune.features.picture_features import Features, picture_features
from finetune.review.doubts import Evidence
from finetune.system.messages import reason

_NUM_NEIGHBOURS = 5  # of each image, which are searched for crops of it
_T = TypeVar("_T")


class Network(NamedTuple):
    """The network that computes features.

    Attributes:
        features: The network.
        preparation: How images are prepared, as `picture_features` takes it.
    """

    features: Features
    preparation: Mapping[str, Any]


class Labelled(NamedTuple):
    """The images that are ranked, N.

    Attributes:
        listing: The images.
        labels: Class index of each image now, (N,).
        is_kept: Which images are not excluded, (N,).
    """

    listing: Listing
    labels: NDArray[np.int64]
    is_kept: NDArray[np.bool_]


class Ranked(NamedTuple):
    """The result.

    Attributes:
        evidence: What is known about the labels.
        features: Features of each image with a mean of 0 and a norm of 1, (N, D); zeros for an image without. None
            without a network.
    """

    evidence: Evidence
    features: NDArray[np.float32] | None


class _Stopped(Exception):
    pass


class RankingJob(threading.Thread):
    """Computes what is known about the labels of a data set.

    Args:
        images: The images.
        network: The network; None to look for copies only.
        mistakes: The mistakes of a run, as in `Evidence`.
        on_ready: Called in the thread with the result.
    """

    def __init__(
        self,
        images: Labelled,
        network: Network | None,
        mistakes: Mapping[int, tuple[int, float]],
        on_ready: Callable[[Ranked], None],
    ) -> None:
        super().__init__(daemon=True)
        self.listing = images.listing
        self.labels = images.labels
        self.is_kept = images.is_kept
        self.network = network
        self.mistakes = mistakes
        self.on_ready = on_ready
        self.error = ""
        self.done = 0
        self.total = len(self.listing.paths) * (1 if network is None else 2)
        self.stopping = threading.Event()

    def stop(self) -> None:
        """End the thread after the current step."""
        self.stopping.set()

    def run(self) -> None:
        try:
            self.on_ready(self._ranked())
        except _Stopped:
            return
        except (
            Exception
        ) as error:  # of any decoder or network: the page then works without a ranking
            self.error = reason(error) or type(error).__name__

    def _counted(self, items: Iterable[_T]) -> Iterator[_T]:
        for item in items:
            if self.stopping.is_set():
                raise _Stopped
            yield item
            self.done += 1

    def _ranked(self) -> Ranked:
        paths = self.listing.paths
        num = len(paths)
        facts = collect_facts(self._counted(inspect_images(paths)), num)
        shows_something = facts.is_readable & ~is_blank(facts) & self.is_kept
        exact = equal_files(paths, np.where(shows_something, facts.num_bytes, -1))
        copies = [copy for members in exact for copy in members[1:]]
        chosen = np.setdiff1d(np.flatnonzero(shows_something), copies)
        near = near_duplicates(facts, chosen)
        probabilities = None
        unit = None
        if self.network is not None and len(chosen) > 1:
            computed = self._counted(
                picture_features(
                    self.network.features,
                    [paths[int(i)] for i in chosen],
                    **self.network.preparation,
                )
            )
            features = np.stack(list(computed))
            i, j = neighbours(features, _NUM_NEIGHBOURS)
            near = larger_crops(facts, chosen[i], chosen[j], near)
            unit = _unit(features, chosen, num)
            probabilities = self._probabilities(features, chosen, near)
        edges = [pair[:2] for pair in near]
        edges += [(members[0], copy) for members in exact for copy in members[1:]]
        errors = {
            index: facts.errors[index]
            for index in np.flatnonzero(~facts.is_readable & self.is_kept).tolist()
        }
        evidence = Evidence(
            self.labels, probabilities, connected(edges, num), self.mistakes, errors
        )
        return Ranked(evidence, unit)

    def _probabilities(
        self, features: NDArray[np.float32], chosen: NDArray[np.int64], near: Iterable[tuple]
    ) -> NDArray[np.float64] | None:
        """Return the out-of-fold probabilities of all images, (N, K); NaN for those that were not chosen."""
        labels = self.labels[chosen]
        if len(np.unique(labels)) < 2:
            return None
        num = len(self.listing.paths)
        groups = np.arange(num)
        for members in connected([pair[:2] for pair in near], num):
            groups[members] = members[0]
        num_classes = len(self.listing.class_names)
        found = np.full((num, num_classes), np.nan)
        found[chosen] = out_of_fold(
            features.astype(np.float64), labels, groups[chosen], num_classes
        )
        # a head cannot learn a class of fewer sets of copies than folds in every fold
        of_sets = np.unique(np.column_stack([labels, groups[chosen]]), axis=0)[:, 0]
        is_small = np.bincount(of_sets, minlength=num_classes) < NUM_FOLDS
        found[chosen[is_small[labels]]] = np.nan
        return found


def _unit(
    features: NDArray[np.float32], chosen: NDArray[np.int64], num: int
) -> NDArray[np.float32]:
    """Return the features of all images for cosine similarity, (N, D); zeros for those that were not chosen."""
    centred = features - features.mean(axis=0)
    unit = np.zeros((num, features.shape[1]), np.float32)
    norms = np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    unit[chosen] = centred / norms
    return unit
