"""The initial weights of a fit; tests/component/test_probe_head.py has the head from features."""

import numpy as np
import pytest

from finetune.training.initial_weights import balanced_weights


def test_balanced_weights_are_inverse_to_frequency_and_one_on_average():
    weights = balanced_weights(np.array([3, 1, 0]))
    # a class without images counts as if it had one
    assert weights.tolist() == pytest.approx([4 / 9, 4 / 3, 4 / 3])
    assert float(balanced_weights(np.array([3, 1]))[[0, 0, 0, 1]].mean()) == pytest.approx(1)
