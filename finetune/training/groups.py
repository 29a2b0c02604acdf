"""One answer for a group of images, such as those of a patient: the group as an image, with logits from all of them.

Of one class an image, the logits of a group are the mean of those of its images. Its calibrated probabilities are then
the mean of their calibrated log probabilities, renormalised: an unsure image moves it little, and ten copies of an
image have the answer of one. Of several labels, each logit is the largest one. So a group has the labels that any of
its images has, as its true labels are, and the thresholds remain those that were chosen for images.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from finetune.data.samples import Samples
from finetune.data.splits import first_of_groups
from finetune.training.calibration import Calibration
from finetune.training.outputs import Outputs

# Shapes: N images, G groups, M of them with an answer, K classes or labels.


class Groups(NamedTuple):
    """The groups of the images of a split, in the order of their first images.

    Attributes:
        samples: The first images of the groups, with the targets of the groups, G.
        outputs: Their outputs, M. `bad` has the groups without an answer: no image could be decoded, or the true
            classes of the images differ.
        sizes: Number of decoded images of each group, (G,).
        means: Of several labels the mean of the calibrated probabilities of the images, (G, K); else (G, 0).
        num_mixed: Number of groups whose images have different classes.
    """

    samples: Samples
    outputs: Outputs
    sizes: np.ndarray
    means: np.ndarray
    num_mixed: int


def group_outputs(outputs: Outputs, calibration: Calibration, samples: Samples) -> Groups:
    """Return the groups of the evaluated images. At least one image could be decoded.

    Args:
        outputs: The outputs for the images.
        calibration: That of the network.
        samples: The images, with groups.
    """
    assert samples.groups is not None
    evaluated = np.sort(np.array([*outputs.index.tolist(), *(i for i, _ in outputs.bad)]))
    first, group_of = first_of_groups(samples.groups[evaluated])
    labels = samples.targets.labels[evaluated]
    highest = _reduced(np.maximum, labels, group_of)
    is_mixed = np.zeros(len(first), bool)
    if labels.ndim == 1:
        is_mixed = highest != _reduced(np.minimum, labels, group_of)
        highest = np.where(is_mixed, -1, highest)
    of_decoded = group_of[np.searchsorted(evaluated, outputs.index.numpy())]
    sizes = np.bincount(of_decoded, minlength=len(first))
    has_answer = (sizes > 0) & ~is_mixed
    is_used = has_answer[of_decoded]
    of_used = of_decoded[is_used]
    used = outputs.logits[torch.from_numpy(is_used)]
    counts = sizes[has_answer, None]
    means = np.zeros((len(first), 0))
    if calibration.label_kind == "single":
        logits = _reduced(np.add, used.double().numpy(), of_used) / counts
    else:
        logits = _reduced(np.maximum, used.numpy(), of_used)
        means = np.zeros((len(first), used.shape[1]))
        sums = _reduced(np.add, calibration.probabilities(used).numpy(), of_used)
        means[has_answer] = sums / counts
    why = np.where(sizes > 0, "its images have different classes", "no image can be decoded")
    index = np.flatnonzero(has_answer)
    return Groups(
        samples=replace(
            samples.take(evaluated[first]), targets=replace(samples.targets, labels=highest)
        ),
        outputs=Outputs(
            index=torch.from_numpy(index),
            logits=torch.from_numpy(logits),
            labels=torch.from_numpy(highest[index]),
            bad=[(i, str(why[i])) for i in np.flatnonzero(~has_answer).tolist()],
        ),
        sizes=sizes,
        means=means,
        num_mixed=int((is_mixed & (sizes > 0)).sum()),
    )


def _reduced(operation: np.ufunc, values: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Return the result of an operation such as `np.add` on the rows of each group that has any, in their order."""
    if not len(values):
        return values
    order = np.argsort(group_of, kind="stable")
    starts = np.flatnonzero(np.diff(group_of[order], prepend=-1))
    reduced: np.ndarray = operation.reduceat(values[order], starts)
    return reduced
