"""Pictures whose label a head fitted on the others would hardly give: likely label errors, ranked, never judged.

Each fifth of the pictures gets its probabilities from a logistic regression on the other four, so that no picture has
taught its own label; copies of one photograph share a fifth. What is least probable under its label comes first: of the
ranks of confident learning (Northcutt, Jiang, Chuang: arXiv:1911.00068, "self-confidence") the simplest, and the best
in their comparison with several others.
"""

# Shapes: N pictures, D features, K classes.

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from finetune.data.checking.duplicates import Pair, connected
from finetune.data.checking.findings import Finding, Row
from finetune.data.datasets.listing import Listing
from finetune.features.logistic_regression import NUM_FOLDS, deal_folds, fit_head
from finetune.system.messages import counted
from finetune.system.progress import watched

NUM_SHOWN = 100
# The ranking hardly depends on it (486 photographs of garments, 30 labels moved to a similar class: AUROC 0.83 at
# 128 pixels from 3e-4 to 1e-5), and to choose it by folds would take ten times as long.
STRENGTH = 3e-4


def out_of_fold(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    groups: NDArray[np.integer],
    num_classes: int,
) -> NDArray[np.float64]:
    """Return the probability of each class for each picture by a head that has not seen it, (N, K).

    Args:
        features: (N, D).
        labels: Class index of each, (N,).
        groups: Number of each picture's set of copies, (N,).
        num_classes: K.
    """
    folds = deal_folds(labels, groups)
    found = np.zeros((len(labels), num_classes))
    for fold in watched(np.unique(folds), NUM_FOLDS, "labels that are improbable"):
        rest, held_out = folds != fold, folds == fold
        if not rest.any():  # all pictures are copies of one
            continue
        weight, bias = fit_head(features[rest], labels[rest], num_classes, STRENGTH)
        logits = features[held_out] @ weight.T + bias
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        found[held_out] = odds / odds.sum(axis=1, keepdims=True)
    return found


def ranked(
    probabilities: NDArray[np.float64], labels: NDArray[np.integer], groups: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return the pictures by how probable their labels are, the least first; none of a class below `NUM_FOLDS`.

    Of a class with fewer sets of copies than folds a head knows too little to doubt anybody.
    """
    given = probabilities[np.arange(len(labels)), labels]
    order = np.argsort(given, kind="stable")
    of_sets = np.unique(np.column_stack([labels, groups]), axis=0)[:, 0]
    counts = np.bincount(of_sets, minlength=probabilities.shape[1])
    return order[counts[labels[order]] >= NUM_FOLDS]


def label_findings(
    listing: Listing,
    chosen: NDArray[np.int64],
    features: NDArray[np.floating],
    near: Sequence[Pair],
) -> Iterator[Finding]:
    """Yield the ranking of the chosen pictures, whose features (N, D) are given, and of which some pairs are copies."""
    groups = np.arange(len(listing.paths))
    for members in connected([pair[:2] for pair in near], len(groups)):
        groups[members] = members[0]
    names, labels = listing.class_names, listing.class_of[chosen]
    if len(np.unique(labels)) < 2:
        return
    probabilities = out_of_fold(features, labels, groups[chosen], len(names))
    rows = []
    for i in ranked(probabilities, labels, groups[chosen])[:NUM_SHOWN].tolist():
        given, best = int(labels[i]), int(probabilities[i].argmax())
        if best != given:
            note = f"{names[given]} by its folder ({probabilities[i, given]:.3f}), {names[best]} by the others "
            rows.append(
                Row(
                    [int(chosen[i])],
                    f"{note}({probabilities[i, best]:.3f})",
                    1 - probabilities[i, given],
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
    """Return pairs i < j of which one is among the `num` pictures nearest to the other, by the angle of features."""
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
    both = np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)
    return both[:, 0], both[:, 1]
