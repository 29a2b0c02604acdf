"""Class activation maps from one forward pass (Zhou et al. 2016, arXiv:1512.04150).

They exist for networks with global average pooling before a linear head. There the logit of class k
is, but for the bias, the mean over all positions of `weight[k] · maps[position]`. That product at
each position is the class activation map. Grad-CAM gives the same map up to a factor. If the head takes
the features of several stages, the maps of the earlier stages are averaged to the size of the last ones,
and added. Other networks are not supported.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from finetune.models.multi_stage import MultiStage, join_features
from finetune.models.stages import head

# Smallest side of a map that is shown, in positions. A map of 2 x 2 positions, as of a ResNet at 64 pixels, only shows
# which corner of the image counts. Resized to the image it seems to show much more.
_SMALLEST_SIDE = 5

# Shapes: B images, C channels, u x v positions of the last feature maps, D features, K classes.


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
    maps, features = _maps_and_features(network, x)
    if not maps or features.shape[1] != sum(of_stage.shape[1] for of_stage in maps):
        return None
    # The head must take exactly the mean of the maps. In bf16 they are equal to the bit.
    means = torch.cat([of_stage.mean(dim=(2, 3)) for of_stage in maps], dim=1)
    if not torch.allclose(features, means, rtol=1e-3, atol=1e-5):
        return None
    weight = head(network).weight.detach()[list(classes)].float()  # numpy has no bf16
    height, width = maps[-1].shape[2:]
    evidence = torch.zeros(len(x), height, width, device=x.device)
    weights = weight.split([of_stage.shape[1] for of_stage in maps], dim=1)
    for of_stage, weight_of_stage in zip(maps, weights, strict=True):
        # averaging keeps the mean over all positions, which the logit adds
        averaged = adaptive_avg_pool2d(of_stage.float(), (height, width))
        evidence += torch.einsum("bc,bcuv->buv", weight_of_stage, averaged)
    return _scale_to_one(evidence.clamp_min(0)).cpu().numpy()


def _maps_and_features(network: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the maps of each stage before pooling, (B, C, u, v), and the input of the head, (B, D).

    If the last maps are unknown, there are no maps.
    """
    last: list[Tensor] = []
    others: list[Tensor] = []
    inputs: list[Tensor] = []
    pools = [module for module in network.modules() if isinstance(module, nn.AdaptiveAvgPool2d)]
    hooks = [
        pool.register_forward_pre_hook(lambda _, args: last.append(args[0])) for pool in pools[-1:]
    ]
    hooks.append(head(network).register_forward_pre_hook(lambda _, args: inputs.append(args[0])))
    try:
        with torch.no_grad():
            if isinstance(network, MultiStage):
                others, features = network.stage_outputs(x)
                inputs.append(join_features(others, features))
            else:
                network(x)
    finally:
        for hook in hooks:
            hook.remove()
    if len(last) != 1 or len(inputs) != 1 or last[0].ndim != 4 or inputs[0].ndim != 2:
        return [], torch.empty(0)
    return [*others, *last], inputs[0]


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
