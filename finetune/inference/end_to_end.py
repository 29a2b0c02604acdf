"""The network as it leaves the tool: pixels in, probabilities out, so that nobody else prepares them otherwise."""

import torch
from torch import Tensor, nn


class EndToEnd(nn.Module):
    """Normalisation, network and temperature in one module.

    Args:
        network: From normalised pictures (N, 3, h, w) to logits (N, K).
        mean: Of the pixels that the network wants to see, (3, 1, 1), in grey levels.
        std: Their standard deviation, likewise.
        temperature: By which logits are divided.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature
        self.register_buffer("mean", mean.float())
        self.register_buffer("std", std.float())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each class (N, K), and the network's own logits (N, K).

        Args:
            images: (N, h, w, 3) uint8 RGB, as files are decoded.
        """
        # Without `contiguous` the exporter leaves a tail of gathers.
        pixels = images.permute(0, 3, 1, 2).contiguous().to(torch.float32)
        logits = self.network((pixels - self.mean) / self.std)
        return (logits / self.temperature).softmax(dim=1), logits
