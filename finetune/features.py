"""Features of pictures, computed once over all devices, and a head fitted on them before training starts."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.models import head
from finetune.probe import fit_probe
from finetune.sharding import assign, is_counted, is_sharded, reshard

if TYPE_CHECKING:
    from finetune.classifier import Classifier
    from finetune.picture_data import PictureData

log = logging.getLogger(__name__)

# Shapes: N pictures of a split, D features.


def probe_head(model: "Classifier", data: "PictureData") -> None:
    """Set the head to a logistic regression on the features of the training pictures, the same for any device count.

    Its strength is chosen on the validation split or, without one, by folds of the training pictures. Classes count as
    they do in training (`class_weights`). The model keeps its mode; only the head changes.
    """
    x, y = features(model, data, "train")
    num_views = data.num_views or 1
    val_x, val_y = features(model, data, "val") if "val" in data.splits else (None, None)
    weights = model.class_weight.double().cpu().numpy()
    probe = (
        fit_probe(x, y, len(model.class_names), val_x, val_y, num_views=num_views, class_weights=weights)
        if model.trainer.is_global_zero
        else None
    )
    probe = model.trainer.strategy.broadcast(probe)
    assert probe is not None
    reshard(model.network)
    linear = head(model.network)
    with torch.no_grad():
        assign(linear.weight, torch.from_numpy(probe.weight))
        assign(linear.bias, torch.from_numpy(probe.bias))
    if model.trainer.is_global_zero:
        accuracy = "" if probe.val_accuracy is None else f", accuracy {probe.val_accuracy:.4f} on pictures held out"
        log.info("head fitted on the features of %d pictures: strength %.1e%s", len(y), probe.strength, accuracy)


@torch.no_grad()
def features(model: "Classifier", data: "PictureData", split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what the head sees of a split's pictures as in evaluation, (N, D) float64, and labels (N,).

    Each device computes its part of the list; every device gets all of it, in order. Fixed views of training pictures
    (`data.num_views`) count each, and are as in training.
    """
    parts = list(_batches(model, data, split))
    x = torch.cat([features for features, _ in parts]).double().numpy()
    y = torch.cat([labels for _, labels in parts]).numpy()
    if model.trainer.world_size == 1:
        return x, y
    everywhere: list[tuple[np.ndarray, np.ndarray]] = [(x, y)] * model.trainer.world_size
    dist.all_gather_object(everywhere, (x, y))
    return np.concatenate([x for x, _ in everywhere]), np.concatenate([y for _, y in everywhere])


def _batches(model: "Classifier", data: "PictureData", split: str) -> Iterator[tuple[Tensor, Tensor]]:
    linear = head(model.network)
    seen: list[Tensor] = []

    def remember(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    handle = linear.register_forward_pre_hook(remember, prepend=True)  # before what spreads it over devices
    was_training = model.training
    model.eval()
    try:
        for batch in data.loader(split):
            images = batch["image"].to(model.device)
            if len(images) or is_sharded(model.trainer):
                with model.trainer.precision_plugin.forward_context():
                    model(images)
            if len(images) and is_counted(model.trainer):
                yield seen[-1].cpu(), batch["label"]
            seen.clear()
        # A device without pictures adds nothing, but has to add something.
        yield torch.empty(0, linear.in_features), torch.empty(0, dtype=torch.int64)
    finally:
        handle.remove()
        model.train(was_training)
