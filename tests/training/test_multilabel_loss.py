"""Binary cross entropy of several labels, compared with torch's own."""

import pytest
import torch
from torch import nn

from finetune.training.multilabel_loss import (
    MultilabelTarget,
    balanced_positive_weights,
    multilabel_loss_sum,
    multilabel_losses,
    multilabel_target,
)

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 3 * torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = (torch.rand(6, 4, generator=GENERATOR) < 0.4).float()
PARTNERS = LABELS.flip(0)
SHARE = torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 30.0])
MIXED = MultilabelTarget(LABELS, PARTNERS, SHARE)


def mean(target: MultilabelTarget, smoothing: float = 0.0, logits=LOGITS) -> torch.Tensor:
    return multilabel_loss_sum(logits, target, WEIGHT, smoothing) / target.weight(WEIGHT)


def reference(labels: torch.Tensor, smoothing: float = 0.0, logits=LOGITS) -> torch.Tensor:
    labels = labels.double() * (1 - smoothing) + smoothing * 0.5
    return nn.BCEWithLogitsLoss(pos_weight=WEIGHT.double())(logits, labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_torch(smoothing):
    torch.testing.assert_close(
        mean(MultilabelTarget(LABELS), smoothing), reference(LABELS, smoothing)
    )
    assert abs(mean(MultilabelTarget(PARTNERS)) - reference(LABELS)) > 1e-2  # control


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_a_mixed_image_is_that_of_the_mixed_target(smoothing):
    blend = SHARE[:, None] * LABELS + (1 - SHARE[:, None]) * PARTNERS
    torch.testing.assert_close(
        mean(MIXED, smoothing), reference(blend, smoothing), rtol=1e-6, atol=0.0
    )
    assert abs(mean(MIXED) - reference(LABELS)) > 1e-2  # control


WEIGHTS = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 0.0])
PARTNER_WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_weight_of_2_is_the_image_twice(smoothing):
    twice = WEIGHTS.long()
    repeated = LABELS.repeat_interleave(twice, dim=0)
    expected = reference(repeated, smoothing, LOGITS.repeat_interleave(twice, dim=0))
    torch.testing.assert_close(mean(MultilabelTarget(LABELS, weights=WEIGHTS), smoothing), expected)
    assert abs(mean(MultilabelTarget(LABELS), smoothing) - expected) > 1e-2  # control


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_each_part_of_a_mixed_image_has_its_own_weight(smoothing):
    target = MultilabelTarget(LABELS, PARTNERS, SHARE, WEIGHTS, PARTNER_WEIGHTS)
    both = torch.cat([SHARE * WEIGHTS, (1 - SHARE) * PARTNER_WEIGHTS])
    labels = torch.cat([LABELS, PARTNERS]).double() * (1 - smoothing) + smoothing / 2
    loss_of = nn.BCEWithLogitsLoss(pos_weight=WEIGHT.double(), reduction="none")
    losses = loss_of(LOGITS.repeat(2, 1), labels).mean(dim=1)
    expected = (both * losses).sum() / both.sum()
    # the shares and weights are float32
    torch.testing.assert_close(mean(target, smoothing), expected, rtol=1e-6, atol=0.0)
    assert abs(mean(MIXED, smoothing) - expected) > 1e-2  # control


def test_the_loss_of_members_is_their_mean():
    members = torch.stack([LOGITS, LOGITS.flip(0)])
    expected = (reference(LABELS) + reference(LABELS, logits=LOGITS.flip(0))) / 2
    torch.testing.assert_close(mean(MultilabelTarget(LABELS), logits=members), expected)


def test_parts_of_a_batch_add_up():
    target = MultilabelTarget(LABELS)
    parts = [MultilabelTarget(LABELS[rows]) for rows in (slice(0, 2), slice(2, 6), slice(6, 6))]
    sums = [
        multilabel_loss_sum(LOGITS[rows], part, WEIGHT, 0.1)
        for rows, part in zip((slice(0, 2), slice(2, 6), slice(6, 6)), parts, strict=True)
    ]
    torch.testing.assert_close(sum(sums), multilabel_loss_sum(LOGITS, target, WEIGHT, 0.1))
    assert sum(part.weight(WEIGHT) for part in parts) == target.weight(WEIGHT) == 6


def test_a_batch_has_its_target():
    batch = {"label": LABELS, "image": None}
    assert multilabel_target(batch) == MultilabelTarget(LABELS)
    mixed = {**batch, "partner_label": PARTNERS, "share": SHARE}
    assert multilabel_target(mixed) == MIXED
    weighted = {**mixed, "weight": WEIGHTS, "partner_weight": PARTNER_WEIGHTS}
    assert multilabel_target(weighted) == MIXED._replace(
        weights=WEIGHTS, partner_weights=PARTNER_WEIGHTS
    )


def test_losses_of_images_are_those_of_torch():
    each = nn.BCEWithLogitsLoss(reduction="none")(LOGITS, LABELS.double()).mean(dim=1)
    torch.testing.assert_close(multilabel_losses(LOGITS.sigmoid(), LABELS), each)
    sure = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert multilabel_losses(sure, sure).item() == 0
    assert 100 < multilabel_losses(sure, 1 - sure).item() < 1000  # finite


def test_low_precision_is_summed_in_float32():
    summed = multilabel_loss_sum(
        LOGITS.bfloat16(), MultilabelTarget(LABELS), WEIGHT.bfloat16(), 0.0
    )
    assert summed.dtype == torch.float32


def test_positives_count_as_much_as_negatives():
    weights = balanced_positive_weights(LABELS.numpy().sum(axis=0).astype(int), 6)
    counts = LABELS.sum(dim=0)
    assert (counts > 0).all()
    torch.testing.assert_close(weights * counts, (6 - counts).double())
    # no label and every label: the weights are finite
    assert balanced_positive_weights(torch.tensor([0, 6]).numpy(), 6).tolist() == [6, 1 / 6]
