"""The loss against torch's own mean, and weights that make classes equal."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from finetune.training.loss import balanced_weights, loss_sum

WEIGHT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_sum_over_the_weights_is_torch_s_mean(smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0, 0])
    expected = F.cross_entropy(logits, labels, WEIGHT, label_smoothing=smoothing)
    torch.testing.assert_close(loss_sum(logits, labels, WEIGHT, smoothing) / WEIGHT[labels].sum(), expected)


def test_balanced_weights_are_inverse_to_frequency_and_one_on_average():
    labels = np.array([0, 0, 0, 1])
    weights = balanced_weights(labels, 3)
    assert weights.tolist() == pytest.approx([4 / 9, 4 / 3, 4 / 3])  # a class without pictures counts as if it had one
    assert float(balanced_weights(np.array([0, 0, 0, 1]), 2)[labels].mean()) == pytest.approx(1)
