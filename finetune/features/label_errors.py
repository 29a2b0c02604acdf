"""A ranking of likely label errors, by out-of-fold probabilities. It is not a judgement.

The probabilities of each fold come from a logistic regression on the other four folds, so no image was trained on with
its own label. Copies of one photograph are in the same fold. The image whose label has the lowest probability is first.

Source: "self-confidence" of confident learning (Northcutt, Jiang, Chuang: arXiv:1911.00068), the simplest of their
rankings and the best in their comparison.
"""

# Shapes: N images, D features, K classes.

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from finetune.data.checking.duplicates import Pair, connected
from finetune.data.checking.findings import Finding, Row
from finetune.data.datasets.listing import Listing
from finetune.features.logistic_regression import NUM_FOLDS, deal_folds, fit_head
from finetune.system.messages import counted
from finetune.system.progress import track

NUM_SHOWN = 100
# The ranking hardly depends on the strength (486 photographs of garments, 30 labels changed to a similar class: AUROC
# 0.83 at 128 pixels from 3e-4 to 1e-5). Choosing it by cross-validation would take ten times as long.
STRENGTH = 3e-4


def out_of_fold(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    groups: NDArray[np.integer],
    num_classes: int,
) -> NDArray[np.float64]:
    """Return the out-of-fold probability of each class for each image, (N, K).

    Args:
        features: (N, D).
        labels: Class index of each image, (N,).
        groups: Index of the set of copies of each image, (N,).
        num_classes: K.
    """
    folds = deal_folds(labels, groups)
    found = np.zeros((len(labels), num_classes))
    for fold in track(np.unique(folds), NUM_FOLDS, "labels that are improbable"):
        rest, held_out = folds != fold, folds == fold
        if not rest.any():  # all images are copies of one
            continue
        weight, bias = fit_head(features[rest], labels[rest], num_classes, STRENGTH)
        logits = features[held_out] @ weight.T + bias
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        found[held_out] = odds / odds.sum(axis=1, keepdims=True)
    return found


def rank_labels(
    probabilities: NDArray[np.float64], labels: NDArray[np.integer], groups: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return the indices of the images by the probability of their labels, lowest first.

    Classes with fewer sets of copies than `NUM_FOLDS` are skipped, because a head cannot learn them in every fold.
    """
    self_confidence = probabilities[np.arange(len(labels)), labels]
    order = np.argsort(self_confidence, kind="stable")
    of_sets = np.unique(np.column_stack([labels, groups]), axis=0)[:, 0]
    counts = np.bincount(of_sets, minlength=probabilities.shape[1])
    return order[counts[labels[order]] >= NUM_FOLDS]


def label_findings(
    listing: Listing,
    chosen: NDArray[np.int64],
    features: NDArray[np.floating],
    near: Sequence[Pair],
) -> Iterator[Finding]:
    """Yield the ranking of the chosen images as a finding.

    Args:
        listing: The data set.
        chosen: Indices of the images, (N,).
        features: Features of the chosen images, (N, D).
        near: Pairs of copies.
    """
    groups = np.arange(len(listing.paths))
    for members in connected([pair[:2] for pair in near], len(groups)):
        groups[members] = members[0]
    names, labels = listing.class_names, listing.class_of[chosen]
    if len(np.unique(labels)) < 2:
        return
    probabilities = out_of_fold(features, labels, groups[chosen], len(names))
    rows = []
    for i in rank_labels(probabilities, labels, groups[chosen])[:NUM_SHOWN].tolist():
        label, best = int(labels[i]), int(probabilities[i].argmax())
        if best != label:
            note = f"{names[label]} by its folder ({probabilities[i, label]:.3f}), {names[best]} by the others "
            rows.append(
                Row(
                    [int(chosen[i])],
                    f"{note}({probabilities[i, best]:.3f})",
                    1 - probabilities[i, label],
                )
            )
    if rows:
        right = float((probabilities.argmax(axis=1) == labels).mean())
        title = f"{counted(len(rows), 'picture')} to look at first for wrong labels"
        advice = (
            "A ranking, not a judgement: a head fitted on the other pictures gives these labels the least probability. "
            f"It is right about {100 * right:.0f} % of all pictures, so the more it errs, the less this says."
        )
        yield Finding("labels", "note", title, advice, rows, is_judged=False)


def neighbours(
    features: NDArray[np.floating], num: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs i < j of which one is among the `num` nearest neighbours of the other, by cosine similarity."""
    x = features - features.mean(axis=0)
    x = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    pairs: list[NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
    num = min(num, len(x) - 1)
    for first in range(0, len(x) if num > 0 else 0, 1024):
        some = np.arange(first, min(first + 1024, len(x)))
        alike = x[some] @ x.T
        alike[np.arange(len(some)), some] = -2  # itself
        nearest = np.argpartition(-alike, num - 1, axis=1)[:, :num]
        pairs.append(np.column_stack([np.repeat(some, num), nearest.ravel()]))
    unique_pairs = np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)
    return unique_pairs[:, 0], unique_pairs[:, 1]
