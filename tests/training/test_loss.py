"""The loss, compared with torch's own, for single classes and mixed targets, and weights that balance classes."""

import pytest
import torch
import torch.nn.functional as F

from finetune.training.loss import Target, loss_sum, target_of

WEIGHT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
LABELS, PARTNERS = torch.tensor([0, 1, 2, 2, 1, 0, 0]), torch.tensor([1, 1, 0, 2, 0, 2, 1])
SHARE = torch.tensor([0.0, 1.0, 0.5, 0.25, 0.125, 0.75, 0.625])
MIXED = Target(LABELS, PARTNERS, SHARE)


def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(7, 3, dtype=torch.float64, requires_grad=True)


def probabilities(target: Target) -> torch.Tensor:
    own, partner = (
        F.one_hot(labels, 3).double() for labels in (target.labels, target.partner_labels)
    )
    return target.share[:, None] * own + (1 - target.share[:, None]) * partner


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_sum_over_the_weights_is_torch_s_mean(smoothing):
    expected = F.cross_entropy(logits(), LABELS, WEIGHT, label_smoothing=smoothing)
    target = Target(LABELS)
    torch.testing.assert_close(
        loss_sum(logits(), target, WEIGHT, smoothing) / target.weight(WEIGHT), expected
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_of_mixed_images_it_is_torch_s_for_probabilities(smoothing):
    ours, reference = logits(), logits()
    loss = loss_sum(ours, MIXED, WEIGHT, smoothing)
    options = {"reduction": "sum", "label_smoothing": smoothing}
    expected = F.cross_entropy(reference, probabilities(MIXED), WEIGHT, **options)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, reference.grad)
    swapped = loss_sum(logits(), Target(PARTNERS, LABELS, SHARE), WEIGHT, smoothing)  # the control
    assert abs(swapped - expected) > 0.01


def test_weights_follow_the_shares():
    torch.testing.assert_close(MIXED.weight(WEIGHT), (probabilities(MIXED) @ WEIGHT).sum())
    assert MIXED.weight(torch.ones(3)) == 7


WEIGHTS = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 2.0, 0.0])
PARTNER_WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 2.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_weight_of_2_is_the_image_twice(smoothing):
    ours, reference = logits(), logits()
    target = Target(LABELS, weights=WEIGHTS)
    loss = loss_sum(ours, target, WEIGHT, smoothing) / target.weight(WEIGHT)
    twice = WEIGHTS.long()
    expected = F.cross_entropy(
        reference.repeat_interleave(twice, dim=0),
        LABELS.repeat_interleave(twice),
        WEIGHT,
        label_smoothing=smoothing,
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, reference.grad)
    plain = loss_sum(logits(), Target(LABELS), WEIGHT, smoothing) / Target(LABELS).weight(WEIGHT)
    assert abs(plain - expected) > 0.01  # the control


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_each_part_of_a_mixed_image_has_its_own_weight(smoothing):
    target = Target(LABELS, PARTNERS, SHARE, WEIGHTS, PARTNER_WEIGHTS)
    loss = loss_sum(logits(), target, WEIGHT, smoothing) / target.weight(WEIGHT)
    options = {"reduction": "none", "label_smoothing": smoothing}
    both = torch.cat([SHARE * WEIGHTS, (1 - SHARE) * PARTNER_WEIGHTS])
    labels = torch.cat([LABELS, PARTNERS])
    losses = F.cross_entropy(logits().repeat(2, 1), labels, WEIGHT, **options)
    expected = (both * losses).sum() / (both * WEIGHT[labels]).sum()
    torch.testing.assert_close(loss, expected)
    swapped = target._replace(weights=PARTNER_WEIGHTS, partner_weights=WEIGHTS)  # the control
    assert abs(loss_sum(logits(), swapped, WEIGHT, smoothing) - (both * losses).sum()) > 0.01


def test_a_batch_of_weight_0_has_a_loss_of_0():
    """Its weight is above 0, unlike that of a batch without images, and too small to change a sum."""
    target = Target(LABELS, weights=torch.zeros(7))
    ours = logits()
    loss = loss_sum(ours, target, WEIGHT, 0.0) / target.weight(WEIGHT)
    loss.backward()
    assert loss == 0 and (ours.grad == 0).all()
    assert target.weight(WEIGHT) > 0 and target.weight(WEIGHT) + 1e-9 == 1e-9


def test_a_complete_share_is_no_mixing():
    full = Target(LABELS, PARTNERS, torch.ones(7))
    for smoothing in (0.0, 0.2):
        plain = loss_sum(logits(), Target(LABELS), WEIGHT, smoothing)
        torch.testing.assert_close(loss_sum(logits(), full, WEIGHT, smoothing), plain)
    assert full.weight(WEIGHT) == Target(LABELS).weight(WEIGHT)


def test_a_batch_says_whether_it_is_mixed_and_may_be_empty():
    batch = {"label": LABELS, "image": None}
    assert target_of(batch) == Target(LABELS)
    mixed = {**batch, "partner_label": PARTNERS, "share": SHARE}
    assert target_of(mixed) == MIXED
    weighted = {**mixed, "weight": WEIGHTS, "partner_weight": PARTNER_WEIGHTS}
    assert target_of(weighted) == Target(LABELS, PARTNERS, SHARE, WEIGHTS, PARTNER_WEIGHTS)
    assert (
        Target(LABELS[:0]).weight(WEIGHT) == 0
        and Target(LABELS[:0], PARTNERS[:0], SHARE[:0]).weight(WEIGHT) == 0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_counts_every_image(dtype):
    num = 4099  # float16 has no whole numbers beyond 2048 but the even ones, bf16 none beyond 256
    labels, weight = torch.zeros(num, dtype=torch.long), torch.ones(3, dtype=dtype)
    half = torch.tensor([[0.0, 1.0, 2.0]], dtype=dtype).expand(num, 3)
    assert float(Target(labels).weight(weight)) == num
    loss = loss_sum(half, Target(labels), weight, 0.0)
    torch.testing.assert_close(loss, loss_sum(half.float(), Target(labels), weight.float(), 0.0))
    assert loss.dtype == torch.float32
    assert float(weight[labels].sum()) != num  # the control
