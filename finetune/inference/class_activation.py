"""Where a network looked: class activation maps, from one forward pass.

A network that averages its last maps over the picture and multiplies by the head says class k with the mean over all
places of `weight[k] · maps[place]`: that product, place by place, is where the class was seen (Zhou et al. 2016,
arXiv:1512.04150). For such networks Grad-CAM gives the same map up to a factor. Others have none here.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from finetune.models.stages import head

# Smallest side of a map that is shown, in places. A map of 2 x 2 places, as of a ResNet at 64 pixels, says which corner
# of the image counts, and resized to the image it seems to say much more.
_SMALLEST_SIDE = 5

# Shapes: B pictures, C channels, u x v places of the last maps, K classes.


def class_activation(network: nn.Module, x: Tensor, classes: Sequence[int]) -> np.ndarray | None:
    """Return how much each place spoke for a class, or None for a network that does not average maps for its head.

    Args:
        network: In evaluation mode.
        x: What the network takes (B, 3, h, w).
        classes: The class to look for in each picture, B.

    Returns:
        (B, u, v) in [0, 1], where 1 is the place that spoke most for it, 0 one that did not or spoke against it.
    """
    maps: list[Tensor] = []
    inputs: list[Tensor] = []
    pools = [module for module in network.modules() if isinstance(module, nn.AdaptiveAvgPool2d)]
    linear = head(network)
    hooks = [
        pool.register_forward_pre_hook(lambda _, given: maps.append(given[0]))
        for pool in pools[-1:]
    ]
    hooks.append(linear.register_forward_pre_hook(lambda _, given: inputs.append(given[0])))
    try:
        with torch.no_grad():
            network(x)
    finally:
        for hook in hooks:
            hook.remove()
    if len(maps) != 1 or len(inputs) != 1 or inputs[0].shape != maps[0].shape[:2]:
        return None
    # in bf16 to the bit
    if not torch.allclose(inputs[0], maps[0].mean(dim=(2, 3)), rtol=1e-3, atol=1e-5):
        return None
    weight = linear.weight.detach()[list(classes)]
    spoken = torch.einsum("bc,bcuv->buv", weight.float(), maps[0].float())  # numpy has no bf16
    return _to_one(spoken.clamp_min(0)).cpu().numpy()


def mean_activation(
    networks: Sequence[nn.Module], x: Tensor, classes: Sequence[int]
) -> np.ndarray | None:
    """Return the mean of the maps of several networks, scaled likewise; None if one of them has none.

    Arguments: see `class_activation`.
    """
    maps = [class_activation(network, x, classes) for network in networks]
    existing = [of_network for of_network in maps if of_network is not None]
    if len(existing) < len(maps):
        return None
    if len(existing) == 1:
        return existing[0]
    return _to_one(torch.from_numpy(np.mean(existing, axis=0))).numpy()


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


def _to_one(spoken: Tensor) -> Tensor:
    """Return maps (B, u, v) of what is at least 0 with their largest value brought to 1."""
    return spoken / spoken.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(spoken.dtype).tiny)
