"""The modules that are exported: they include normalization, so that no user of a file can get it wrong."""

import torch
from torch import Tensor, nn

from finetune.models.image_classifier import ImageClassifier, normalize
from finetune.training.calibration import Calibration


class _Softmax(nn.Module):
    """Logits (N, K) to the probability of each class."""

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        (self.scale,) = calibration.scale

    def forward(self, logits: Tensor) -> Tensor:
        return (logits * self.scale).softmax(dim=1)


class _Sigmoid(nn.Module):
    """Logits (N, K) to the probability of each label."""

    scale: Tensor
    bias: Tensor

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(calibration.scale))
        self.register_buffer("bias", torch.tensor(calibration.bias))

    def forward(self, logits: Tensor) -> Tensor:
        return (logits * self.scale + self.bias).sigmoid()


class EndToEnd(nn.Module):
    """Normalization, network, calibration and softmax in one module, from uint8 images to probabilities.

    If images have several labels, a sigmoid takes the place of the softmax.

    Args:
        model: The image classifier. The module shares its weights and its parameter names, which exported files keep.
        calibration: Turns logits into probabilities.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ImageClassifier, calibration: Calibration) -> None:
        super().__init__()
        self.network = model.network
        self.probabilities: nn.Module = (
            _Sigmoid(calibration) if calibration.label_kind == "several" else _Softmax(calibration)
        )
        self.register_buffer("mean", model.mean.float())
        self.register_buffer("std", model.std.float())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each class (N, K), and the logits (N, K) before calibration.

        Args:
            images: (N, h, w, 3) uint8 RGB.
        """
        # Without `contiguous` the exporter adds needless Gather nodes.
        pixels = images.permute(0, 3, 1, 2).contiguous().to(torch.float32)
        logits = self.network(normalize(pixels, self.mean, self.std))
        return self.probabilities(logits), logits
