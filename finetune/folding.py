"""Batch norm folded into the convolutions before it, where nothing trains: each then saves a walk through memory."""

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from torch import fx, nn

from finetune.sharding import is_sharded

if TYPE_CHECKING:
    from finetune.classifier import Classifier


class Fold(pl.Callback):
    """Lets `finetune validate`, `test` and `predict` in bf16 compute with a folded copy of the network.

    bf16 rounds more than folding does; in float32 the network stays as it is, and results are those of training's code.
    """

    def _fold(self, trainer: pl.Trainer, pl_module: "Classifier") -> None:
        if trainer.state.fn != "fit" and trainer.precision == "bf16-mixed" and not is_sharded(trainer):
            pl_module.evaluate = folded(pl_module.network).forward  # not the module: a checkpoint would hold it

    on_validation_start = on_test_start = on_predict_start = _fold  # type: ignore[assignment]

    def _leave(self, trainer: pl.Trainer, pl_module: "Classifier", *_: Any) -> None:
        pl_module.evaluate = None

    on_validation_end = on_test_end = on_predict_end = on_exception = _leave  # type: ignore[assignment]


def folded(part: nn.Module) -> nn.Module:
    """Return a copy with batch norm folded into the convolutions before it.

    What it computes is the same up to rounding. A part that torch.fx can't follow comes back as it is.

    Args:
        part: In eval mode.
    """
    from torch.fx.experimental.optimization import fuse  # only what evaluates or has something frozen needs it

    try:
        return fuse(part)
    except fx.proxy.TraceError:
        return part
