"""The losses of one label and of several labels an image, compared with torch's own."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from finetune.training.loss import (
    balanced_positive_weights,
    balanced_weights,
    loss_sum,
    target_of,
)

CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 30.0], dtype=torch.float64)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, labels, CLASS_WEIGHT, label_smoothing=smoothing)


def binary_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    labels = labels.double() * (1 - smoothing) + smoothing * 0.5
    return nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT)(logits, labels)


KINDS = {"single": cross_entropy, "several": binary_cross_entropy}


def drawn(kind: str, seed: int, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels, and labels of the images that are mixed in."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num, 4, generator=generator, dtype=torch.float64)
    if kind == "single":
        both = torch.randint(4, (2, num), generator=generator)
    else:
        both = (torch.rand(2, num, 4, generator=generator) < 0.4).float()
    return logits.requires_grad_(), *both


def mean(logits: Tensor, batch: dict[str, Any], smoothing: float = 0.0) -> Tensor:
    target = target_of(batch)
    summed = loss_sum(logits, target, CLASS_WEIGHT, smoothing)
    return summed / target.weight(CLASS_WEIGHT)


WHOLE = st.integers(0, 3)  # weights of images
QUARTERS = st.integers(0, 4)  # shares of mixed images


@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**32),
    smoothing=st.sampled_from([0.0, 0.2]),
    images=st.lists(st.tuples(WHOLE, WHOLE, QUARTERS), min_size=1, max_size=8),
    is_weighted=st.booleans(),
    is_mixed=st.booleans(),
)
@example("single", 0, 0.0, [(0, 0, 4)] * 3, True, False)
@example("several", 0, 0.0, [(0, 0, 4)] * 3, True, False)
@example("several", 0, 0.2, [(2, 1, 3), (0, 3, 2)], True, True)
def test_the_mean_loss_is_torch_s_of_as_many_copies(
    kind, seed, smoothing, images, is_weighted, is_mixed
):
    """An image of weight 2 counts twice, and a share of a quarter is a quarter of a copy of each of two images."""
    weights, partner_weights, quarters = torch.tensor(images).T
    if not is_weighted:
        weights = partner_weights = torch.ones(len(images), dtype=torch.long)
    if not is_mixed:
        quarters = torch.full((len(images),), 4)
    copies = torch.cat([quarters * weights, (4 - quarters) * partner_weights])
    logits, labels, partners = drawn(kind, seed, len(images))
    batch = {"label": labels, "image": None}
    if is_mixed:
        batch |= {"partner_label": partners, "share": quarters / 4}
    if is_weighted:
        batch["weight"] = weights.float()
    if is_weighted and is_mixed:
        batch["partner_weight"] = partner_weights.float()
    loss = mean(logits, batch, smoothing)
    (gradient,) = torch.autograd.grad(loss, logits)
    if not copies.any():
        # not 0 / 0: the weight is above 0, and too small to change a sum
        weight = target_of(batch).weight(CLASS_WEIGHT)
        assert loss == 0 and not gradient.any() and weight > 0 and weight + 1e-9 == 1e-9
        return
    repeated = torch.cat([logits, logits]).repeat_interleave(copies, dim=0)
    wanted = torch.cat([labels, partners]).repeat_interleave(copies, dim=0)
    expected = KINDS[kind](repeated, wanted, smoothing)
    # the shares and weights are float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-12)
    (reference,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_batch_add_up_and_one_may_be_empty(kind):
    """Devices have unequal parts of a batch, and some have none."""
    logits, labels, _ = drawn(kind, 0, 6)
    target = target_of({"label": labels})
    sums, weights = [], []
    for rows in (slice(0, 2), slice(2, 6), slice(6, 6)):
        part = target_of({"label": labels[rows]})
        sums.append(loss_sum(logits[rows], part, CLASS_WEIGHT, 0.1))
        weights.append(part.weight(CLASS_WEIGHT))
    whole = loss_sum(logits, target, CLASS_WEIGHT, 0.1)
    torch.testing.assert_close(sum(sums), whole)
    assert sum(weights) == target.weight(CLASS_WEIGHT) and weights[2] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_counts_every_image(kind, dtype):
    num = 4099  # float16 has no whole numbers beyond 2048 but the even ones, bf16 none beyond 256
    labels = torch.zeros(num, dtype=torch.long) if kind == "single" else torch.zeros(num, 3)
    weight = torch.ones(3, dtype=dtype)
    half = torch.tensor([[0.0, 1.0, 2.0]], dtype=dtype).expand(num, 3)
    target = target_of({"label": labels})
    assert float(target.weight(weight)) == num
    loss = loss_sum(half, target, weight, 0.0)
    expected = loss_sum(half.float(), target, weight.float(), 0.0)
    torch.testing.assert_close(loss, expected)
    assert loss.dtype == torch.float32
    assert float(weight[torch.zeros(num, dtype=torch.long)].sum()) != num  # the control


COUNTS = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@given(counts=COUNTS)
def test_balanced_class_weights_give_each_class_the_same_and_images_a_mean_of_1(counts):
    counts = np.array(counts)
    weights = balanced_weights(counts).numpy()
    total = counts.sum() / len(counts)
    # a class without images counts as if it had one
    np.testing.assert_allclose(weights * np.maximum(counts, 1), total)


@given(counts=COUNTS)
def test_balanced_positives_count_as_much_as_negatives(counts):
    counts = np.array(counts)
    weights = balanced_positive_weights(counts, 20).numpy()
    # a label of no image or of all: the weight is finite
    np.testing.assert_allclose(weights * np.maximum(counts, 1), np.maximum(20 - counts, 1))
