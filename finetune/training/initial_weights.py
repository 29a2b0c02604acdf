"""The weights that a fit starts from: pretrained weights, the head, and the class weights of the loss."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from finetune.data.datamodule import ImageDataModule
from finetune.models.image_classifier import ImageClassifier
from finetune.models.source_head import source_head
from finetune.models.weights import load_pretrained, read_weights
from finetune.settings.schema import HeadInit
from finetune.training.outputs import collect

if TYPE_CHECKING:  # scipy takes a second to import
    from finetune.features.linear_probe import FittedHead

log = logging.getLogger(__name__)

_SOLVED = (
    "the backbone is frozen, so the head is solved exactly, as the logistic regression on its features: %s. "
    "Epochs, learning rate and augmentation have no effect"
)


@dataclass(frozen=True)
class InitialWeights:
    """The source of the weights of an image classifier, before its head is fitted.

    Attributes:
        weights: The value of `--model.weights`; None for random weights.
        backbone: The name of the network.
        network_size: Side of the images in pixels, for networks with position embeddings.
        head_init: How the head starts; `source` copies rows of the source classifier.
        class_names: The classes, in the order of the head's rows.
        class_mapping: For `source`: class to source class, or to several.
        source_classes: For `source`: text file with the names of the source classes.
    """

    weights: str | None
    backbone: str
    network_size: int | None
    head_init: HeadInit
    class_names: Sequence[str]
    class_mapping: Mapping[str, str | list[str]] | None = None
    source_classes: str | None = None

    def download(self) -> None:
        """Download the weights if they are published ones."""
        if self.weights is not None:
            read_weights(self.weights, self.backbone, self.network_size)

    def load_into(self, model: ImageClassifier) -> None:
        """Load the weights. If `head_init` is `source`, also copy rows of the source classifier's head."""
        pretrained = None
        if self.weights is not None:
            pretrained = load_pretrained(model, self.weights, self.backbone, self.network_size)
        if self.head_init != "source":
            return
        source_classes = None
        if self.source_classes:
            source_classes = Path(self.source_classes).read_text("utf-8").splitlines()
        source_head(
            model.network,
            pretrained,
            list(self.class_names),
            dict(self.class_mapping or {}),
            source_classes,
        )


def fit_head(trainer: pl.Trainer, model: Any, data: ImageDataModule) -> "FittedHead":
    """Fit the head of a network on the features of the training images. Every rank must call this.

    Args:
        trainer: Its devices and precision are used.
        model: A `Classifier` in eval mode. Its head is changed.
        data: The images.
    """
    from finetune.features.linear_probe import probe_head

    return probe_head(trainer, model, data)


def score_of_head(trainer: pl.Trainer, model: Any, data: ImageDataModule) -> float | None:
    """Return the monitored metric on the validation images before training; None if nothing is validated.

    It is the same on all ranks, and every rank must call this.

    Args:
        trainer: Its devices and precision are used, and its limit of the validation batches.
        model: A `Classifier` in eval mode, with its fitted head.
        data: The images.
    """
    if "val" not in data.splits or trainer.limit_val_batches == 0:
        return None
    outputs = collect(trainer, model, data.loader("val", is_limited=True)).gather(trainer)
    score = None
    if outputs is not None and len(outputs.index):
        score = model.task.score(outputs.logits, outputs.labels)
    return trainer.strategy.broadcast(score)


def log_fitted_head(fitted: "FittedHead", start: str, is_solved: bool) -> None:
    """Log how the head was fitted.

    Args:
        fitted: The head.
        start: Its metric on the validation images, with its name; "" if there is none.
        is_solved: Whether nothing else trains.
    """
    if is_solved:
        log.info(_SOLVED, fitted.describe())
        return
    on_val = f", {start}" if start else ""
    message = "the head begins as the logistic regression on its features: %s%s"
    log.info(message, fitted.describe(), on_val)
