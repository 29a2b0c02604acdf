"""Features of pictures, computed once over all devices, and a head fitted on them before training starts."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.data.datamodule import ImageDataModule
from finetune.distributed.collectives import cpu_group
from finetune.features.logistic_regression import fit_probe
from finetune.models.stages import head

log = logging.getLogger(__name__)

# Shapes: N pictures of a split, D features, K classes.


def probe_head(
    trainer: pl.Trainer,
    network: nn.Module,
    forward: Callable[[Tensor], Tensor],
    data: ImageDataModule,
    class_weight: Tensor,
) -> None:
    """Set the head to a logistic regression on the features of the training pictures, the same for any device count.

    Its strength is chosen on the validation split or, without one, by folds of the training pictures.

    Args:
        trainer: Of the devices that share the pictures.
        network: Whose head it is; only that changes.
        forward: From a batch's pictures to the logits through that head, as in evaluation.
        data: Whose train and, where there is one, val these are.
        class_weight: What classes count in training, (K,).

    Raises:
        ValueError: There is no training picture, on all devices.
    """
    linear = head(network)
    x, y = head_inputs(trainer, forward, linear, data.loader("train"))
    if not trainer.strategy.broadcast(len(y)):
        root = getattr(trainer.datamodule, "root", None)  # type: ignore[attr-defined]
        raise ValueError(f"head_init probe: none of the training pictures in {root} can be decoded")
    has_val = "val" in data.splits
    val_x, val_y = head_inputs(trainer, forward, linear, data.loader("val")) if has_val else (None, None)
    weights = class_weight.double().cpu().numpy()
    probe = fit_probe(x, y, len(weights), val_x, val_y, class_weights=weights) if trainer.is_global_zero else None
    probe = trainer.strategy.broadcast(probe)
    assert probe is not None
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(probe.weight))
        linear.bias.copy_(torch.from_numpy(probe.bias))
    if trainer.is_global_zero:
        accuracy = "" if probe.val_accuracy is None else f", accuracy {probe.val_accuracy:.4f} on pictures held out"
        log.info("head fitted on the features of %d pictures: strength %.1e%s", len(y), probe.strength, accuracy)


@torch.no_grad()
def head_inputs(
    trainer: pl.Trainer, forward: Callable[[Tensor], Tensor], linear: nn.Linear, batches: Iterable[dict[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the head sees of pictures, (N, D) float64, and labels (N,), in order.

    Each device computes its batches; the first gets all, the others have their own. See `probe_head` for the arguments.
    """
    parts = list(_batches(trainer, forward, linear, batches))
    x, y = torch.cat([features for features, _ in parts]), torch.cat([labels for _, labels in parts])
    everywhere = [(x, y)]
    if trainer.world_size > 1:  # as they are: float64 would take twice the memory on its way
        is_first = trainer.is_global_zero
        everywhere *= trainer.world_size if is_first else 1
        dist.gather_object((x, y), everywhere if is_first else None, dst=0, group=cpu_group(trainer.strategy))
    x, y = torch.cat([x for x, _ in everywhere]), torch.cat([y for _, y in everywhere])
    return x.double().numpy(), y.numpy()


def _batches(
    trainer: pl.Trainer, forward: Callable[[Tensor], Tensor], linear: nn.Linear, batches: Iterable[dict[str, Any]]
) -> Iterator[tuple[Tensor, Tensor]]:
    seen: list[Tensor] = []

    def remember(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    handle = linear.register_forward_pre_hook(remember)
    try:
        for batch in batches:
            images = batch["image"].to(trainer.strategy.root_device)
            if len(images):
                with trainer.precision_plugin.forward_context():
                    forward(images)
                yield seen[-1].cpu(), batch["label"]
            seen.clear()
        # A device without pictures adds nothing, but has to add something.
        yield torch.empty(0, linear.in_features), torch.empty(0, dtype=torch.int64)
    finally:
        handle.remove()
