"""The facts in a checkpoint: which run it is from, and whether it fits the network that loads it."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

import finetune
from finetune.runs.model_checkpoint import Checkpoints

_SAME = ("backbone", "class_names", "members", "label_kind", "head_stages")


def origin(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the facts about its run that a checkpoint records."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    seen = getattr(data, "seen", None)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    run = next((callback.run for callback in callbacks if isinstance(callback, Checkpoints)), None)
    return {
        "version": finetune.__version__,
        "torch": str(torch.__version__),
        "precision": trainer.precision,
        "data_fingerprint": getattr(data, "fingerprint", ""),
        "seen": seen.pack() if seen else None,
        "data_class": _class_path(type(data)),
        "began_from": run and run.began_from,
        "licence_of_the_weights": run and run.licence,
    }


def _class_path(kind: type) -> str:
    """Return the name of a class in checkpoints: the public name if there is one, so that its module may move."""
    is_public = getattr(finetune, kind.__name__, None) is kind
    return f"finetune.{kind.__name__}" if is_public else f"{kind.__module__}.{kind.__qualname__}"


def check_fits(
    checkpoint: Mapping[str, Any], hyper_parameters: Mapping[str, Any], network: nn.Module
) -> None:
    """Check that the weights of a checkpoint fit a network and are for the same classes.

    Args:
        checkpoint: The checkpoint, read by `read_checkpoint` or by Lightning.
        hyper_parameters: Hyperparameters of the model that loads it.
        network: The network of that model.

    Raises:
        ValueError: The weights do not fit, or are for other classes.
    """
    for name in _SAME:
        own = hyper_parameters[name]
        other = checkpoint["hyper_parameters"][name]
        if own != other:
            raise ValueError(f"the checkpoint is of a run with {name} {other}, this one has {own}")
    check_size(checkpoint, hyper_parameters["network_size"], network)


def check_size(checkpoint: Mapping[str, Any], size: int | None, network: nn.Module) -> None:
    """Check that the weights of a checkpoint are for images of the size that a network was built for.

    Args:
        checkpoint: A checkpoint of a network of the same kind.
        size: Side of the images in pixels that the network was built for.
        network: The network. Its shapes depend on the size if it has an embedding of each patch's position.

    Raises:
        ValueError: The weights are for another size.
    """
    other = checkpoint["hyper_parameters"].get("network_size")
    if other == size:
        return
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    for key, value in checkpoint["state_dict"].items():
        name = key.removeprefix("network.")
        if name in shapes and value.shape != shapes[name]:
            raise ValueError(
                f"the checkpoint's network is made for images of {other} pixels, this one for {size}: pass "
                f"--data.image_size {other}, or begin a new run with --model.weights and that checkpoint"
            )
