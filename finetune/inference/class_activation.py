"""Class activation maps from one forward pass (Zhou et al. 2016, arXiv:1512.04150).

They exist for networks with global average pooling before a linear head. There the logit of class k
is, but for the bias, the mean over all positions of `weight[k] · maps[position]`. That product at
each position is the class activation map. Grad-CAM gives the same map up to a factor. Other networks
are not supported.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from finetune.models.stages import head

# Smallest side of a map that is shown, in positions. A map of 2 x 2 positions, as of a ResNet at 64 pixels, only tells
# which corner of the image counts. Resized to the image it seems to tell much more.
_SMALLEST_SIDE = 5

# Shapes: B images, C channels, u x v positions of the last feature maps, K classes.


def class_activation(network: nn.Module, x: Tensor, classes: Sequence[int]) -> np.ndarray | None:
    """Return how much each position contributes to a class, or None if the network is not supported.

    Args:
        network: A network in evaluation mode.
        x: Input of the network (B, 3, h, w).
        classes: The class of each image, B.

    Returns:
        (B, u, v) in [0, 1]: 1 at the position with the largest contribution, 0 where the contribution
        is zero or negative.
    """
    maps: list[Tensor] = []
    inputs: list[Tensor] = []
    pools = [module for module in network.modules() if isinstance(module, nn.AdaptiveAvgPool2d)]
    linear = head(network)
    hooks = [
        pool.register_forward_pre_hook(lambda _, args: maps.append(args[0])) for pool in pools[-1:]
    ]
    hooks.append(linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0])))
    try:
        with torch.no_grad():
            network(x)
    finally:
        for hook in hooks:
            hook.remove()
    if len(maps) != 1 or len(inputs) != 1 or inputs[0].shape != maps[0].shape[:2]:
        return None
    # The head must take exactly the mean of the maps. In bf16 they are equal to the bit.
    if not torch.allclose(inputs[0], maps[0].mean(dim=(2, 3)), rtol=1e-3, atol=1e-5):
        return None
    weight = linear.weight.detach()[list(classes)]
    evidence = torch.einsum("bc,bcuv->buv", weight.float(), maps[0].float())  # numpy has no bf16
    return _scale_to_one(evidence.clamp_min(0)).cpu().numpy()


def mean_activation(
    networks: Sequence[nn.Module], x: Tensor, classes: Sequence[int]
) -> np.ndarray | None:
    """Return the mean of the maps of several networks, scaled to [0, 1]; None if one of them has no map.

    Arguments: see `class_activation`.
    """
    maps = [class_activation(network, x, classes) for network in networks]
    existing = [network_map for network_map in maps if network_map is not None]
    if len(existing) < len(maps):
        return None
    if len(existing) == 1:
        return existing[0]
    return _scale_to_one(torch.from_numpy(np.mean(existing, axis=0))).numpy()


def why_not_shown(maps: np.ndarray | None) -> str:
    """Return why class activation maps (B, u, v) are not shown as heat maps, or "" if they are."""
    if maps is None:
        return "No heat maps: this network does not average its last feature maps for its head."
    height, width = maps.shape[1:]
    if min(height, width) < _SMALLEST_SIDE:
        return (
            f"No heat maps: at this image size they have only {height} x {width} cells, which is too coarse. "
            "Larger images (image_size) give finer ones."
        )
    return ""


def _scale_to_one(maps: Tensor) -> Tensor:
    """Scale non-negative maps (B, u, v) such that the largest value of each is 1."""
    return maps / maps.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
