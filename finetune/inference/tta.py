"""Test-time augmentation: what is said of a picture is said of several views of it, and averaged."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor


class AverageFlip(pl.Callback):
    """Lets `finetune validate`, `test` and `predict` see each picture as it is and mirrored, and take the mean logits.

    Logits rather than probabilities: temperature and threshold then mean what they meant. It takes twice the time of
    the network, and decodes nothing twice. Where a mirrored picture shows another class, as of letters, leave it out.
    """

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logits_of = type(pl_module).forward

        def forward(images: Tensor) -> Tensor:
            return (logits_of(pl_module, images) + logits_of(pl_module, images.flip(-1))) / 2

        pl_module.forward = forward  # type: ignore[method-assign]

    on_validation_start = on_test_start = on_predict_start = _begin

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        pl_module.__dict__.pop("forward", None)

    on_validation_end = on_test_end = on_predict_end = on_exception = _end  # type: ignore[assignment]
