"""The network as it leaves the tool: pixels in, probabilities out, so that nobody else prepares them otherwise."""

import torch
from torch import Tensor, nn

from finetune.models.ensemble import combine_logits
from finetune.models.image_classifier import ImageClassifier, normalize
from finetune.models.stages import head, without_head


class EndToEnd(nn.Module):
    """Normalization, network and temperature in one module, from bytes as files are decoded to probabilities.

    Args:
        model: Its weights are shared, and the names of its parts, which exported files keep.
        temperature: By which logits are divided.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ImageClassifier, temperature: float) -> None:
        super().__init__()
        self.network = model.network
        self.temperature = temperature
        self.register_buffer("mean", model.mean.float())
        self.register_buffer("std", model.std.float())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each class (N, K), and the network's own logits (N, K).

        Args:
            images: (N, h, w, 3) uint8 RGB, as files are decoded.
        """
        # Without `contiguous` the exporter leaves a tail of gathers.
        pixels = images.permute(0, 3, 1, 2).contiguous().to(torch.float32)
        logits = self.network(normalize(pixels, self.mean, self.std))
        return (logits / self.temperature).softmax(dim=1), logits


class Logits(ImageClassifier):
    """An image classifier whose members answer as one in training mode, too."""

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, H, W) uint8 RGB."""
        return combine_logits(super().forward(images))


class Embedder(nn.Module):
    """A network without its head, which shares the weights of the network.

    Args:
        whole: With its head.

    Attributes:
        num_features: D; of an ensemble, that of all members together.
    """

    def __init__(self, whole: ImageClassifier) -> None:
        super().__init__()
        self.num_features = sum(head(network).in_features for network in whole.members)
        self.parts = nn.ModuleList(
            ImageClassifier(without_head(network), whole.mean, whole.std)
            for network in whole.members
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, D), the input of the head, of images (B, 3, H, W) uint8 RGB; members are concatenated."""
        return torch.cat([part(images).flatten(1) for part in self.parts], dim=1)
