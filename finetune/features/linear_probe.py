"""A linear probe: a head fitted on the features of the training images, which all ranks compute together."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from finetune.data.datamodule import ImageDataModule
from finetune.distributed.collectives import gather_on_rank_zero
from finetune.features.familiarity import recorded_features
from finetune.features.logistic_regression import Probe, fit_probe
from finetune.models.stages import head
from finetune.system.messages import counted, shown

log = logging.getLogger(__name__)

# Shapes: N images of a split, D features, K classes.


@dataclasses.dataclass(frozen=True)
class FittedHead:
    """A fitted head and its results.

    Attributes:
        probe: The head.
        features: Features of the training images, (N, D) float64; empty on ranks other than 0.
        labels: Labels of the same images, (N,) or (N, K); empty on ranks other than 0.
        weights: Weights of the same images, (N,); None for 1 each.
        num_images: N.
        seconds: Time to compute the features and to fit the head.
    """

    probe: Probe
    features: Tensor
    labels: Tensor
    weights: Tensor | None
    num_images: int
    seconds: float

    @property
    def logits(self) -> Tensor:
        """Logits of the same images, (N, K)."""
        weight = torch.from_numpy(self.probe.weight)
        return self.features @ weight.T + torch.from_numpy(self.probe.bias)

    def describe(self) -> str:
        """Return a text with the number of images, the time, the strength and the score."""
        name = "accuracy" if self.labels.ndim == 1 else "mAP"
        if self.probe.score is None:
            score = " (too few images to choose it by cross-validation)"
        else:
            score = f", cross-validated {name} {self.probe.score:.4f}"
        num_images = counted(self.num_images, "image")
        return f"{num_images}, {self.seconds:.1f} s, strength {self.probe.strength:.1e}{score}"


def probe_head(trainer: pl.Trainer, model: Any, data: ImageDataModule) -> FittedHead:
    """Set the head to a logistic regression on the features of the training images.

    The result is the same for any number of devices. Images are prepared as in evaluation. Validation images are not
    used.

    Args:
        trainer: The Trainer; each rank computes the features of its images.
        model: A `Classifier` in eval mode. The features are recorded while it computes logits. Its class weights and
            label smoothing apply. Only its head changes.
        data: The data module; its train split is used, with the weights of its images.

    Raises:
        ValueError: No training image with a weight above 0 can be decoded, or a feature is not finite. All ranks raise
            it.
    """
    began = time.perf_counter()
    linear = head(model.network)
    x, y, indices = head_inputs(trainer, model, linear, data.loader("train"))
    train = data.splits["train"]
    image_weights = None if train.weights is None else train.weights[indices]
    groups = None if train.groups is None else train.groups[indices]
    class_weights = model.class_weight.double().cpu().numpy()
    is_weighted = np.ones(len(y), bool) if image_weights is None else image_weights > 0
    if y.ndim == 1:
        is_weighted = is_weighted & (class_weights[y] > 0)
    if not trainer.strategy.broadcast(bool(is_weighted.any())):
        root = getattr(trainer.datamodule, "root", None)  # type: ignore[attr-defined]
        has_weights = image_weights is not None or not class_weights.all()
        some = " with a weight above 0" if has_weights else ""
        raise ValueError(
            f"{root} has no training image{some} that can be decoded: there is nothing to fit a head on"
        )
    num_images = trainer.strategy.broadcast(len(y))
    message = trainer.strategy.broadcast(_not_finite(x, indices, train.paths))
    if message:
        raise ValueError(message)
    if trainer.is_global_zero and len(x) > 1 and np.ptp(x, axis=0).max() <= 1e-6 * np.abs(x).max():
        log.warning(
            "the features of all %d training images are equal, so the head predicts the same class for every image. "
            "Check whether the images are copies, and whether the weights are damaged",
            len(x),
        )
    probe = None
    if trainer.is_global_zero:
        probe = fit_probe(
            x,
            y,
            len(class_weights),
            class_weights=class_weights,
            label_smoothing=model.task.label_smoothing,
            image_weights=image_weights,
            groups=groups,
        )
    probe = trainer.strategy.broadcast(probe)
    assert probe is not None
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(probe.weight))
        linear.bias.copy_(torch.from_numpy(probe.bias))
    num_own = len(y) if trainer.is_global_zero else 0
    return FittedHead(
        probe=probe,
        features=torch.from_numpy(x[:num_own]),
        labels=torch.from_numpy(y[:num_own]),
        weights=None if image_weights is None else torch.from_numpy(image_weights[:num_own]),
        num_images=num_images,
        seconds=time.perf_counter() - began,
    )


def _not_finite(x: np.ndarray, indices: np.ndarray, paths: Sequence[str]) -> str:
    """Return a message if features are not finite; else "".

    Args:
        x: Features, (N, D).
        indices: The indices of their images, (N,).
        paths: The paths of all images.
    """
    broken = indices[~np.isfinite(x).all(axis=1)]
    if not len(broken):
        return ""
    return (
        f"the network computes features that are not finite (NaN or infinite) for {len(broken)} of "
        f"{counted(len(x), 'training image')}, for example {shown(paths[int(broken.min())])}. The weights may be "
        "damaged: use others (--weights), or --precision 32-true if the fit is in half precision"
    )


@torch.no_grad()
def head_inputs(
    trainer: pl.Trainer,
    forward: Callable[[Tensor], Tensor],
    linear: nn.Linear,
    batches: Iterable[dict[str, Any]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the inputs of the head, (N, D) float64, the labels (N,) or (N, K), and the indices of the images, (N,).

    Each rank computes its own batches. Rank 0 returns all images, other ranks their own.

    Args:
        trainer: Each rank computes the features of its images.
        forward: Computes the logits of a batch as in evaluation.
        linear: The head.
        batches: The batches of this rank.
    """
    parts = list(head_inputs_of_rank(trainer, forward, linear, batches))
    own = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    of_ranks = gather_on_rank_zero(own, trainer)  # before float64, which doubles the size
    features, labels, indices = (torch.cat(column) for column in zip(*of_ranks, strict=True))
    return features.double().numpy(), labels.numpy(), indices.numpy()


@torch.no_grad()
def head_inputs_of_rank(
    trainer: pl.Trainer,
    forward: Callable[[Tensor], Tensor],
    linear: nn.Linear,
    batches: Iterable[dict[str, Any]],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the inputs of the head, the labels and the indices of the images of each batch of this rank."""
    with recorded_features(linear) as recorded:
        for batch in batches:
            images = batch["image"].to(trainer.strategy.root_device)
            if len(images):
                with trainer.precision_plugin.forward_context():
                    forward(images)
                yield recorded[-1].cpu(), batch["label"], batch["index"]
            recorded.clear()
        # A rank without images also needs tensors to concatenate. Labels of any shape can follow an empty vector.
        none = torch.empty(0, dtype=torch.int64)
        yield torch.empty(0, linear.in_features), none, none
