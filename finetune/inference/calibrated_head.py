"""The calibration of a network inside its head: then a plain softmax or sigmoid of its logits is calibrated."""

from torch import Tensor

from finetune.training.calibration import AnyCalibration
from finetune.training.multilabel_calibration import MultilabelCalibration

# Shapes: D features, K classes or labels.


def calibrated_head(
    weight: Tensor, bias: Tensor, calibration: AnyCalibration
) -> tuple[Tensor, Tensor]:
    """Return the weight (K, D) and the bias (K,) of a head, changed so that its logits are calibrated.

    They are computed in float64, and returned in the dtypes of the arguments.
    """
    double_weight = weight.double()
    double_bias = bias.double()
    if isinstance(calibration, MultilabelCalibration):
        scale = double_weight.new_tensor(calibration.scale)
        shift = double_bias.new_tensor(calibration.bias)
        double_weight = double_weight * scale[:, None]
        double_bias = double_bias * scale + shift
    else:
        double_weight = double_weight / calibration.temperature
        double_bias = double_bias / calibration.temperature
    return double_weight.to(weight.dtype), double_bias.to(bias.dtype)


def without_scaling(calibration: AnyCalibration) -> AnyCalibration:
    """Return what is left of a calibration after `calibrated_head`: the thresholds."""
    if isinstance(calibration, MultilabelCalibration):
        num_labels = len(calibration.scale)
        return calibration._replace(scale=(1.0,) * num_labels, bias=(0.0,) * num_labels)
    return calibration._replace(temperature=1.0)
