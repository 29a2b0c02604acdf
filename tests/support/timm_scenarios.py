"""Networks of timm, trained as every rank of a world: `timm_scenarios.py OUT DATA WORLD_SIZE`."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import small_timm
import torch
from ddp_scenarios import begin, own_statistics, trainer, weights_of
from torch import Tensor, nn

from finetune import Classifier, ImageFolderData
from finetune.models.stages import batch_norms

assert small_timm  # registers three of the networks

# Family: a small network of its class, side of its images in pixels. The last draws stochastic depth at rates of its
# own. timm builds those named test_ with the classes of the large ones, for tests, as small_timm.py does.
FAMILIES = {
    "resnet": ("timm/test_resnet", 48),
    "convnext": ("timm/test_convnext", 48),
    "efficientnet": ("timm/test_efficientnet", 48),
    "mobilenetv4": ("timm/mobilenetv4_conv_small_035", 48),
    "vit": ("timm/small_vit", 32),
    "dinov2": ("timm/small_vit_dinov2", 28),
    "focalnet": ("timm/small_focalnet", 32),
}


def with_statistics(network: nn.Module, image_size: int) -> nn.Module:
    """Give a random network the running statistics of a trained one: without, training blows any rounding up."""
    norms = batch_norms(network)
    moments = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # type: ignore[assignment]
    with torch.no_grad():
        network.train()(torch.randn(8, 3, image_size, image_size))
    for norm, moment in zip(norms, moments, strict=True):
        norm.momentum = moment  # type: ignore[assignment]
    return network


def weights_after(
    data: ImageFolderData, backbone: str, steps: int = 2, **options: Any
) -> dict[str, Tensor]:
    """Train in float64 and return the weights of this process."""
    pl.seed_everything(1, verbose=False)
    model = Classifier(
        data.class_names,
        backbone,
        None,
        network_size=data.image_size,
        **{"optimizer": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9), **options},
    )
    with_statistics(model.network, data.image_size)
    trainer(precision="64-true", max_steps=steps, max_epochs=-1, limit_val_batches=0).fit(
        model, datamodule=data
    )
    return weights_of(model)


def main() -> None:
    (out, _, data), world_size = begin(), int(sys.argv[3])
    scenarios = {
        name: lambda backbone=backbone, size=size: weights_after(data(image_size=size), backbone)
        for name, (backbone, size) in FAMILIES.items()
    }
    mobilenet, focal = FAMILIES["mobilenetv4"], FAMILIES["focalnet"]
    scenarios["frozen"] = lambda: weights_after(
        data(image_size=48), mobilenet[0], 6, freeze="blocks.2", freeze_batch_norm=True
    )
    if world_size == 2:

        def control(context: Any, family: tuple[str, int]) -> dict[str, Tensor]:
            with context:
                return weights_after(data(image_size=family[1]), family[0])

        scenarios["control_own_statistics"] = lambda: control(own_statistics(), mobilenet)
        torchs = patch.dict(sys.modules, {"timm.layers": None})  # timm's own draws, seeded by rank
        scenarios["control_own_draws"] = lambda: control(torchs, focal)
    for name, scenario in scenarios.items():
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        result = scenario()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else rank
        torch.save(result, Path(out) / f"{name}_{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
