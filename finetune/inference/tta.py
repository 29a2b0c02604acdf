"""Test-time augmentation: average the predictions for several views of an image."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor


class AverageFlip(pl.Callback):
    """Averages the logits of each image and its mirror image in `finetune validate`, `test` and `predict`.

    It averages logits, not probabilities, so that temperature and threshold still apply. The network takes twice the
    time; each image is decoded once. Do not use it where a mirror image may be of another class, such as a letter.
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
