"""A ranking of likely label errors, by out-of-fold probabilities. It is not a judgement.

The probabilities of each fold come from a logistic regression on the other four folds, so no image was trained on with
its own label. Copies of one photograph, and images of one group, are in the same fold. The image whose label has the
lowest probability is first.

Source: "self-confidence" of confident learning (Northcutt, Jiang, Chuang: arXiv:1911.00068), the simplest of their
rankings and the best in their comparison.
"""

# Shapes: N images, D features, K classes.

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from finetune.data.checking.copies import Pair, connected
from finetune.data.checking.findings import Finding, Row
from finetune.data.data_set import DataSet
from finetune.data.targets import MultiHot
from finetune.features.logistic_regression import (
    NUM_FOLDS,
    deal_folds,
    first_of_groups,
    fit_head,
)
from finetune.system.messages import counted
from finetune.system.progress import track

NUM_SHOWN = 100
# The ranking hardly depends on the strength (486 photographs of garments, 30 labels changed to a similar class: AUROC
# 0.83 at 128 pixels from 3e-4 to 1e-5). Choosing it by cross-validation would take ten times as long.
STRENGTH = 3e-4


def _with_progress(folds: Sequence[int]) -> Iterable[int]:
    return track(folds, NUM_FOLDS, "labels that are improbable")


def fold_groups(data: DataSet, copies: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return a number for each image, (N,). Images with the same number must be in one fold.

    These are copies of one photograph and images of one group, such as a patient.

    Args:
        data: The data set.
        copies: Pairs of images that show the same photograph.
    """
    numbers = np.arange(len(data.paths))
    edges = list(copies)
    if data.groups is not None:
        first, group_of = first_of_groups(data.groups)
        edges += zip(first[group_of].tolist(), numbers.tolist(), strict=True)
    for members in connected(edges, len(numbers)):
        numbers[members] = members[0]
    return numbers


def out_of_fold(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    groups: NDArray[np.integer],
    num_classes: int,
    watch: Callable[[Sequence[int]], Iterable[int]] = _with_progress,
) -> NDArray[np.float64]:
    """Return the out-of-fold probability of each class for each image, (N, K); 0 if all images are copies of one.

    Args:
        features: (N, D).
        labels: Class index of each image, (N,). If images have several labels, (N, K), 0 or 1.
        groups: Number of each image, as `fold_groups` returns it, (N,).
        num_classes: K.
        watch: Yields the folds that it gets, to show the progress or to stop.
    """
    has_several = labels.ndim == 2
    strata = MultiHot(labels.astype(np.uint8)).strata() if has_several else labels
    folds = deal_folds(strata, groups)
    probabilities = np.zeros((len(labels), num_classes))
    for fold in watch(np.unique(folds).tolist()):
        rest = folds != fold
        held_out = folds == fold
        if not rest.any():  # all images are copies of one
            continue
        weight, bias = fit_head(features[rest], labels[rest], num_classes, STRENGTH)
        logits = features[held_out] @ weight.T + bias
        probabilities[held_out] = expit(logits) if has_several else softmax(logits, axis=1)
    return probabilities


def rank_labels(
    probabilities: NDArray[np.float64], labels: NDArray[np.integer], groups: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return the indices of the images by the probability of their labels, lowest first.

    Classes with fewer groups than `NUM_FOLDS` are skipped, because a head cannot learn them in every fold.
    """
    self_confidence = probabilities[np.arange(len(labels)), labels]
    order = np.argsort(self_confidence, kind="stable")
    return order[learnable_classes(labels, groups, probabilities.shape[1])[labels[order]]]


def learnable_classes(
    labels: NDArray[np.integer], groups: NDArray[np.integer], num_classes: int
) -> NDArray[np.bool_]:
    """Return which classes have at least `NUM_FOLDS` groups, so that a head can learn them in every fold, (K,).

    Args:
        labels: Class index of each image, (N,).
        groups: Number of each image, as `fold_groups` returns it, (N,).
        num_classes: K.
    """
    of_sets = np.unique(np.column_stack([labels, groups]), axis=0)[:, 0]
    return np.bincount(of_sets, minlength=num_classes) >= NUM_FOLDS


def learnable_labels(
    has_label: NDArray[np.integer], groups: NDArray[np.integer]
) -> NDArray[np.bool_]:
    """Return which labels at least `NUM_FOLDS` groups have, and as many lack, (K,).

    Args:
        has_label: Whether each image has each label, (N, K), 0 or 1.
        groups: Number of each image, as `fold_groups` returns it, (N,).
    """
    first, group_of = first_of_groups(groups)
    is_present = has_label[first]
    is_lacking = 1 - is_present
    np.maximum.at(is_present, group_of, has_label)
    np.maximum.at(is_lacking, group_of, 1 - has_label)
    return np.minimum(is_present.sum(axis=0), is_lacking.sum(axis=0)) >= NUM_FOLDS


def label_findings(
    data: DataSet,
    chosen: NDArray[np.int64],
    features: NDArray[np.floating],
    near: Sequence[Pair],
) -> Iterator[Finding]:
    """Yield the ranking of the chosen images as a finding; of several labels that of pairs of image and label.

    Args:
        data: The data set.
        chosen: Indices of the images, (N,).
        features: Features of the chosen images, (N, D).
        near: Pairs of copies.
    """
    groups = fold_groups(data, [pair[:2] for pair in near])
    if data.label_kind == "several":
        has_label = data.targets.labels[chosen].astype(np.int64)
        yield from _several_label_findings(
            data.class_names, has_label, chosen, features, groups[chosen]
        )
        return
    names = data.class_names
    labels = data.targets.labels[chosen]
    if len(np.unique(labels)) < 2:
        return
    probabilities = out_of_fold(features, labels, groups[chosen], len(names))
    rows = []
    for i in rank_labels(probabilities, labels, groups[chosen])[:NUM_SHOWN].tolist():
        label = int(labels[i])
        best = int(probabilities[i].argmax())
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
        title = f"{counted(len(rows), 'image')} to look at first for wrong labels"
        advice = (
            "A ranking, not a judgement: a head fitted on the other images gives these labels the least probability. "
            f"It is right about {100 * right:.0f} % of all images; the lower this is, the less reliable the ranking."
        )
        yield Finding("labels", "note", title, advice, rows, is_judged=False)


def rank_label_pairs(
    probabilities: NDArray[np.float64],
    has_label: NDArray[np.integer],
    groups: NDArray[np.integer],
) -> NDArray[np.int64]:
    """Return pairs of an image and a label (P, 2) by the probability that the pair is as stated, lowest first.

    Labels are skipped that fewer groups than `NUM_FOLDS` have or lack.
    """
    is_learnable = learnable_labels(has_label, groups)
    self_confidence = np.where(has_label == 1, probabilities, 1 - probabilities)
    self_confidence[:, ~is_learnable] = np.inf
    order = np.argsort(self_confidence, axis=None, kind="stable")
    order = order[: has_label.shape[0] * int(is_learnable.sum())]
    return np.column_stack(np.unravel_index(order, has_label.shape))


def _several_label_findings(
    names: Sequence[str],
    has_label: NDArray[np.integer],
    chosen: NDArray[np.int64],
    features: NDArray[np.floating],
    groups: NDArray[np.integer],
) -> Iterator[Finding]:
    """Yield the ranking of the pairs of an image and a label.

    Args:
        names: The labels, K.
        has_label: Whether each image has each label, (N, K), 0 or 1.
        chosen: Indices of the images, (N,).
        features: Features of the images, (N, D).
        groups: Number of each image, as `fold_groups` returns it, (N,).
    """
    probabilities = out_of_fold(features, has_label, groups, len(names))
    rows = []
    for i, k in rank_label_pairs(probabilities, has_label, groups)[:NUM_SHOWN].tolist():
        p = probabilities[i, k]
        is_present = bool(has_label[i, k])
        if (p >= 0.5) != is_present:
            what = "has" if is_present else "lacks"
            note = f"{what} {names[k]}, which is predicted with probability {p:.3f}"
            rows.append(Row([int(chosen[i])], note, 1 - p if is_present else p))
    if rows:
        right = float(((probabilities >= 0.5) == has_label).mean())
        title = f"{counted(len(rows), 'label')} to look at first, wrong or missing"
        advice = (
            "A ranking, not a judgement: a head fitted on the other images gives these labels the least probability. "
            f"It is right about {100 * right:.0f} % of all pairs of image and label; the lower this is, the less "
            "reliable the ranking."
        )
        yield Finding("labels", "note", title, advice, rows, is_judged=False)
