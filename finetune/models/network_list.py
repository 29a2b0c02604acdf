"""The networks of torchvision and timm, with size and licence, and whether their weights are on this machine."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchvision import models

from finetune.models.backbones import SMALL_NETWORKS, build, vit_size
from finetune.models.candidates import Candidate, cached_file
from finetune.models.network_names import PREFIX, TORCHVISION
from finetune.models.timm_backbones import has_timm
from finetune.system.messages import WrongUsage

_TORCHVISION_LICENCE = "BSD-3-Clause code; ImageNet's terms"
_SWAG = "https://github.com/facebookresearch/SWAG/blob/main/LICENSE"  # CC BY-NC 4.0


@dataclass(frozen=True)
class ListedNetwork:
    """A network with its default weights.

    Attributes:
        name: Value of `model.backbone`. Those of timm begin with `timm/` and name their weights.
        image_size: Side in pixels of the images that the weights were trained on.
        licence: Licence of the weights; "" if it is not stated.
    """

    name: str
    image_size: int
    licence: str

    def is_local(self) -> bool:
        """Return whether the published weights are in the cache of torch or of the Hugging Face hub."""
        return cached_file(Candidate(self.name)) is not None

    def num_parameters(self) -> int | None:
        """Return the number of parameters with a head of 1,000 classes; None for a network that a fit refuses.

        torchvision publishes that of its networks, some of which cannot be built without memory for their weights.
        """
        if self.name in TORCHVISION:
            return int(models.get_model_weights(self.name).DEFAULT.meta["num_params"])
        try:
            with torch.device("meta"):
                return sum(parameter.numel() for parameter in build(self.name, 1000).parameters())
        except WrongUsage:
            return None


def torchvision_networks() -> Iterator[ListedNetwork]:
    """Yield finetune's own networks and those of torchvision."""
    for name in SMALL_NETWORKS:
        yield ListedNetwork(name, 28, "")
    for name in TORCHVISION:
        if name.startswith("squeezenet"):  # a fit refuses it
            continue
        weights = models.get_model_weights(name).DEFAULT
        own_size = vit_size(name, None) and weights.meta["min_size"][0]
        licence = weights.meta.get("license", _TORCHVISION_LICENCE)
        yield ListedNetwork(
            name,
            own_size or weights.transforms().crop_size[0],
            "CC-BY-NC-4.0" if licence == _SWAG else licence,
        )


def timm_networks() -> Iterator[ListedNetwork]:
    """Yield the networks of timm with published weights, if it is installed. A fit refuses those with several heads."""
    if not has_timm():
        return
    import timm

    for name in timm.list_pretrained():
        config = timm.get_pretrained_cfg(name)
        if config.hf_hub_id:
            yield ListedNetwork(PREFIX + name, config.input_size[1], config.license or "")
