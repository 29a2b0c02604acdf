"""Training that has diverged, whose loss or weights are no numbers: no checkpoint has such a step."""

import math

import pytorch_lightning as pl
import torch


def check_finite(trainer: pl.Trainer, *names: str) -> None:
    """Make sure that what was logged under some names are numbers.

    Raises:
        ValueError: One is infinite or none.
    """
    for name in names:
        value = float(trainer.callback_metrics.get(name, 0.0))
        if not math.isfinite(value):
            raise _diverged(trainer, f"{name} is {value}")


def check_weights(trainer: pl.Trainer) -> None:
    """Refuse, on all devices, what a step of finite loss may have made of the weights of any of them.

    Raises:
        ValueError: Some that learn are infinite or none.
    """
    learning = (p.detach() for p in trainer.lightning_module.parameters() if p.requires_grad)
    found = [parameter.isfinite().all() for parameter in learning]
    is_finite = not found or bool(torch.stack(found).all())  # a GPU is asked once
    if not trainer.strategy.reduce_boolean_decision(is_finite, all=True):
        raise _diverged(trainer, "some weights are no finite numbers")


def _diverged(trainer: pl.Trainer, text: str) -> ValueError:
    rates = ", ".join(f"{group['lr']:.3g}" for group in trainer.optimizers[0].param_groups)
    return ValueError(
        f"{text} in epoch {trainer.current_epoch + 1}: training has diverged; a lower "
        f"--model.optimizer.init_args.lr may help (the rates now: {rates}). No checkpoint has that step"
    )
