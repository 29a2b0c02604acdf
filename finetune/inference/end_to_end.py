"""The network as it leaves the tool: pixels in, probabilities out, so that nobody else prepares them otherwise."""

import torch
from torch import Tensor, nn

from finetune.models.ensemble import members, together
from finetune.models.stages import head, without_head


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


class Logits(nn.Module):
    """Normalization and network in one module, which shares the weights of the network.

    Args:
        network: From normalized images (B, 3, H, W) to logits (B, K); an ensemble that trains, (M, B, K).
        mean: Of the pixels that the network expects, (3, 1, 1), in grey levels.
        std: Their standard deviation, likewise.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", std.clone())

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, H, W) uint8 RGB."""
        pixels = (images.to(self.mean.dtype) - self.mean) / self.std
        return together(self.network(pixels.contiguous(memory_format=torch.channels_last)))


class Embedder(nn.Module):
    """A network without its head, which shares the weights of the network.

    Args:
        whole: With its head.

    Attributes:
        num_features: D; of an ensemble, that of all members together.
    """

    def __init__(self, whole: Logits) -> None:
        super().__init__()
        networks = members(whole.network)
        self.num_features = sum(head(network).in_features for network in networks)
        self.parts = nn.ModuleList(
            Logits(without_head(network), whole.mean, whole.std) for network in networks
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, D), the input of the head, of images (B, 3, H, W) uint8 RGB; members are concatenated."""
        return torch.cat([part(images).flatten(1) for part in self.parts], dim=1)
