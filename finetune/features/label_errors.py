"""A ranking of likely label errors, by out-of-fold probabilities. It is not a judgement.

The probabilities of each fold come from a logistic regression on the other four folds, so no image was trained on with
its own label. Copies of one photograph, and images of one group, are in the same fold. What is ranked are pairs of an
image and a label: of images with one class the pairs of an image and its class, of images with several labels all
pairs, since a label may be wrong or missing. The pair whose statement has the lowest probability is first.

Source: "self-confidence" of confident learning (Northcutt, Jiang, Chuang: arXiv:1911.00068), the simplest of their
rankings and the best in their comparison.
"""

# Shapes: N images, D features, K classes, P pairs of an image and a label.

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from finetune.data.checking.copies import Pair, connected
from finetune.data.checking.findings import Finding, Row
from finetune.data.data_set import DataSet
from finetune.data.splits import first_of_groups
from finetune.features.logistic_regression import NUM_FOLDS, cross_validate
from finetune.system.messages import counted

NUM_SHOWN = 100
# The ranking hardly depends on the strength (486 photographs of garments, 30 labels changed to a similar class: AUROC
# 0.83 at 128 pixels from 3e-4 to 1e-5). Choosing it by cross-validation would take ten times as long.
STRENGTH = 3e-4


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
) -> NDArray[np.float64]:
    """Return the out-of-fold probability of each class for each image, (N, K); 0 if no image can be held out.

    Args:
        features: (N, D).
        labels: Class index of each image, (N,). If images have several labels, (N, K), 0 or 1.
        groups: Number of each image, as `fold_groups` returns it, (N,).
        num_classes: K.
    """
    validation = cross_validate(features, labels, num_classes, [STRENGTH], groups)
    if not validation.table:
        return np.zeros((len(labels), num_classes))
    logits = validation.out_of_fold
    return expit(logits) if labels.ndim == 2 else softmax(logits, axis=1)


def learnable_labels(
    labels: NDArray[np.integer], groups: NDArray[np.integer], num_classes: int
) -> NDArray[np.bool_]:
    """Return which labels at least `NUM_FOLDS` groups have, and as many lack, (K,): a head learns them in every fold.

    Args:
        labels: As in `out_of_fold`.
        groups: Number of each image, as `fold_groups` returns it, (N,).
        num_classes: K.
    """
    first, group_of = first_of_groups(groups)
    if labels.ndim == 1:
        of_group, label = np.unique(np.column_stack([group_of, labels]), axis=0).T
        is_only = np.bincount(of_group)[of_group] == 1
        num_present = np.bincount(label, minlength=num_classes)
        num_lacking = len(first) - np.bincount(label[is_only], minlength=num_classes)
    else:
        is_present = labels[first]
        is_lacking = 1 - is_present
        np.maximum.at(is_present, group_of, labels)
        np.maximum.at(is_lacking, group_of, 1 - labels)
        num_present = is_present.sum(axis=0)
        num_lacking = is_lacking.sum(axis=0)
    return np.minimum(num_present, num_lacking) >= NUM_FOLDS


def rank_labels(
    probabilities: NDArray[np.float64], labels: NDArray[np.integer], groups: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return pairs of an image and a label, (P, 2), by the probability of what is stated, lowest first.

    Labels that a head cannot learn in every fold are skipped.

    Args:
        probabilities: (N, K).
        labels: As in `out_of_fold`.
        groups: Number of each image, as `fold_groups` returns it, (N,).
    """
    if labels.ndim == 1:
        pairs = np.column_stack([np.arange(len(labels)), labels])
    else:
        pairs = np.indices(labels.shape).reshape(2, -1).T
    is_learnable = learnable_labels(labels, groups, probabilities.shape[1])
    pairs = pairs[is_learnable[pairs[:, 1]]]
    images = pairs[:, 0]
    classes = pairs[:, 1]
    confidence = probabilities[images, classes]
    if labels.ndim == 2:
        confidence = np.where(labels[images, classes] == 1, confidence, 1 - confidence)
    return pairs[np.argsort(confidence, kind="stable")]


def label_findings(
    data: DataSet,
    chosen: NDArray[np.int64],
    features: NDArray[np.floating],
    near: Sequence[Pair],
) -> Iterator[Finding]:
    """Yield the ranking of the labels of the chosen images as a finding.

    Args:
        data: The data set.
        chosen: Indices of the images, (N,).
        features: Features of the chosen images, (N, D).
        near: Pairs of copies.
    """
    groups = fold_groups(data, [pair[:2] for pair in near])[chosen]
    labels = data.targets.labels[chosen]
    if len(np.unique(labels, axis=0)) < 2:
        return
    has_several = data.label_kind == "several"
    probabilities = out_of_fold(features, labels, groups, len(data.class_names))
    notes = _notes_of_labels if has_several else _notes_of_classes
    rows = []
    for i, k in rank_labels(probabilities, labels, groups)[:NUM_SHOWN].tolist():
        p = float(probabilities[i, k])
        is_stated = not has_several or bool(labels[i, k])
        note = notes(data.class_names, probabilities[i], k, is_stated)
        if note:
            rows.append(Row([int(chosen[i])], note, 1 - p if is_stated else p))
    if not rows:
        return
    if has_several:
        right = ((probabilities >= 0.5) == labels).mean()
        title = f"{counted(len(rows), 'label')} to look at first, wrong or missing"
    else:
        right = (probabilities.argmax(axis=1) == labels).mean()
        title = f"{counted(len(rows), 'image')} to look at first for wrong labels"
    what = "pairs of image and label" if has_several else "images"
    advice = (
        "A ranking, not a judgement: a head fitted on the other images gives these labels the least probability. "
        f"It is right about {100 * right:.0f} % of all {what}; the lower this is, the less reliable the ranking."
    )
    yield Finding("labels", "note", title, advice, rows, is_judged=False)


def _notes_of_classes(names: Sequence[str], p: NDArray[np.float64], k: int, _: bool) -> str:
    """Return the note of an image of a class k with the probabilities p (K,); "" if k is the most probable one."""
    best = int(p.argmax())
    if best == k:
        return ""
    return f"{names[k]} by its folder ({p[k]:.3f}), {names[best]} by the others ({p[best]:.3f})"


def _notes_of_labels(names: Sequence[str], p: NDArray[np.float64], k: int, is_stated: bool) -> str:
    """Return the note of an image that has or lacks a label k; "" if that is more probable than not."""
    if (p[k] >= 0.5) == is_stated:
        return ""
    what = "has" if is_stated else "lacks"
    return f"{what} {names[k]}, which is predicted with probability {p[k]:.3f}"
