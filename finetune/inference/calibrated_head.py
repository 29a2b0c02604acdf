"""The calibration of a network inside its head: then a plain softmax or sigmoid of its logits is calibrated."""

from torch import Tensor

from finetune.training.calibration import Calibration

# Shapes: D features, K classes or labels.


def calibrated_head(
    weight: Tensor, bias: Tensor, calibration: Calibration
) -> tuple[Tensor, Tensor]:
    """Return the weight (K, D) and the bias (K,) of a head, changed so that its logits are calibrated.

    They are computed in float64, and returned in the dtypes of the arguments.
    """
    scale = weight.double().new_tensor(
        calibration.scale
    )  # one for all classes, or one for each label
    shift = bias.double().new_tensor(calibration.bias)
    return (
        (weight.double() * scale[:, None]).to(weight.dtype),
        (bias.double() * scale + shift).to(bias.dtype),
    )
