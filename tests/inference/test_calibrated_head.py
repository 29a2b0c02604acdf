"""A head with the calibration inside gives the logits of the head, calibrated."""

import pytest
import torch
from torch.nn.functional import linear

from finetune.inference.calibrated_head import calibrated_head, without_scaling
from finetune.training.calibration import Calibration
from finetune.training.multilabel_calibration import MultilabelCalibration

OF_LABELS = MultilabelCalibration((0.5, 3.0, 1.0), (0.25, -2.0, 0.0), (0.4, 0.5, 0.6))


@pytest.mark.parametrize("calibration", [Calibration(0.37, 50), OF_LABELS])
def test_the_logits_of_the_head_need_no_calibration(calibration):
    torch.manual_seed(0)
    features = torch.randn(20, 8, dtype=torch.float64)
    weight = torch.randn(3, 8, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)
    plain = without_scaling(calibration)
    expected = calibration.probabilities(linear(features, weight, bias))
    actual = plain.probabilities(linear(features, *calibrated_head(weight, bias, calibration)))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    # control
    assert (plain.probabilities(linear(features, weight, bias)) - expected).abs().max() > 0.1
    if calibration is OF_LABELS:
        assert plain.thresholds == OF_LABELS.thresholds


def test_a_scale_is_not_rounded_before_it_is_applied():
    weight = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    scaled, _ = calibrated_head(weight, torch.zeros(3), Calibration(0.3))
    assert scaled.dtype == torch.float32
    assert torch.equal(scaled, (weight.double() / 0.3).float())
    in_float32 = (weight.double() * torch.tensor(1 / 0.3).double()).float()
    assert not torch.equal(in_float32, scaled)  # control
