"""Training that has diverged: no checkpoint is written of losses or weights that are not finite."""

import math

import pytorch_lightning as pl
import torch


def check_finite(trainer: pl.Trainer, *names: str) -> None:
    """Check that the metrics of these names are finite.

    Raises:
        ValueError: One is NaN or infinite.
    """
    for name in names:
        value = float(trainer.callback_metrics.get(name, 0.0))
        if not math.isfinite(value):
            raise _diverged(trainer, f"{name} is {value}")


def check_weights(trainer: pl.Trainer) -> None:
    """Check that the trainable weights are finite on all ranks. A step with a finite loss may break them.

    Raises:
        ValueError: Some weights of a rank are NaN or infinite. It is raised on all ranks.
    """
    trainable = (p.detach() for p in trainer.lightning_module.parameters() if p.requires_grad)
    checks = [parameter.isfinite().all() for parameter in trainable]
    is_finite = not checks or bool(torch.stack(checks).all())  # one synchronization with a GPU
    if not trainer.strategy.reduce_boolean_decision(is_finite, all=True):
        raise _diverged(trainer, "some weights are not finite numbers")


def _diverged(trainer: pl.Trainer, text: str) -> ValueError:
    return ValueError(
        f"{text} in epoch {trainer.current_epoch + 1}: training has diverged. Try {gentler_training(trainer)}. "
        "No checkpoint has that step"
    )


def gentler_training(trainer: pl.Trainer) -> str:
    """Return what to set where training breaks a network: a wider precision, or a lower rate than the full ones."""
    if str(trainer.precision) == "16-true":
        return "--precision 32-true or bf16-mixed, since 16-true has no numbers above 65,504"
    # a schedule changes `lr`, to 0 after its last step
    groups = trainer.optimizers[0].param_groups
    rates = dict.fromkeys(f"{group.get('initial_lr', group['lr']):.3g}" for group in groups)
    return f"a lower --lr (its full rates: {', '.join(rates)})"
