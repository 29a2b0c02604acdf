"""Small networks of each family of timm; three of them are registered with timm under their own names.

timm has none of these kinds below 5 million parameters: a vision transformer of a fixed size with a class token, one
with the patch size and the layer scale of DINOv2, and one with its own rates of stochastic depth.
"""

from typing import Any

from timm.models import focalnet, generate_default_cfgs, register_model, vision_transformer
from torch import nn

# Family: a small network of its class, side of its images in pixels. The last draws stochastic depth at rates of its
# own. timm builds those named test_ with the classes of the large ones, for tests.
FAMILIES = {
    "resnet": ("timm/test_resnet", 48),
    "convnext": ("timm/test_convnext", 48),
    "efficientnet": ("timm/test_efficientnet", 48),
    "mobilenetv4": ("timm/mobilenetv4_conv_small_035", 48),
    "vit": ("timm/small_vit", 32),
    "dinov2": ("timm/small_vit_dinov2", 28),
    "focalnet": ("timm/small_focalnet", 32),
}
_OF = {  # each has the preparation of images, the head and the first layer of a network of timm
    "small_vit": vision_transformer.default_cfgs["vit_tiny_patch16_224"],
    "small_vit_dinov2": vision_transformer.default_cfgs["vit_small_patch14_dinov2"],
    "small_focalnet": focalnet.default_cfgs["focalnet_tiny_srf"],
}
default_cfgs = generate_default_cfgs({name: cfg.default.to_dict() for name, cfg in _OF.items()})


@register_model
def small_vit(pretrained: bool = False, **options: Any) -> nn.Module:
    shape = {"patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 3}
    return _transformer("small_vit", pretrained, {**shape, **options})


@register_model
def small_vit_dinov2(pretrained: bool = False, **options: Any) -> nn.Module:
    shape = {"patch_size": 14, "embed_dim": 48, "depth": 3, "num_heads": 3, "init_values": 1e-5}
    return _transformer("small_vit_dinov2", pretrained, {**shape, **options})


@register_model
def small_focalnet(pretrained: bool = False, **options: Any) -> nn.Module:
    shape = {"depths": [1, 1, 2, 1], "embed_dim": 16}
    return focalnet._create_focalnet("small_focalnet", pretrained, **{**shape, **options})


def _transformer(name: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    return vision_transformer._create_vision_transformer(name, pretrained=pretrained, **options)
