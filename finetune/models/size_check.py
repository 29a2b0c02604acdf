"""A forward pass on one blank image, so that an unsupported image size fails before training begins."""

import torch
from torch import Tensor, nn

from finetune.models.backbones import SMALL_NETWORKS
from finetune.models.image_classifier import ImageClassifier
from finetune.models.stages import batch_norms
from finetune.models.timm_backbones import describe, is_timm


def check_first_pass(
    model: ImageClassifier, backbone: str, image_size: int
) -> dict[nn.Module, int]:
    """Check that a network takes images of a size. The network stays unchanged.

    Args:
        model: The image classifier, on the CPU.
        backbone: The name of its network, for the error message.
        image_size: Side of the images in pixels.

    Returns:
        For each batch norm the number of values per channel that it gets from one image.

    Raises:
        ValueError: The network does not take images of this size.
    """
    network = model.network
    num_values: dict[nn.Module, int] = {}

    def count(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        num_values[norm] = inputs[0].numel() // inputs[0].size(1)

    handles = [norm.register_forward_pre_hook(count) for norm in batch_norms(network)]
    modes = [(module, module.training) for module in network.modules()]
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(1, 3, image_size, image_size, dtype=model.mean.dtype))
    except Exception as error:  # networks raise errors of many types if an image is too small
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{backbone} does not support images of {image_size}x{image_size} pixels: {reason}"
            f"{_advice(backbone)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return num_values


def _advice(backbone: str) -> str:
    if is_timm(backbone):
        size = describe(backbone).image_size
        return f"; that of its weights is --data.image_size {size}"
    if backbone in SMALL_NETWORKS:
        return ""
    return "; most networks take --data.image_size 224"
