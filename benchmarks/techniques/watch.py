"""What a fit would have said of its validation pictures after each epoch, and by averages of its weights at the end."""

import copy
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import albumentations as A
import pytorch_lightning as pl
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop, five_crop

from finetune.data.resize import SmallestMaxSize
from finetune.data.transforms import resized_side

DECAYS = (0.9, 0.95, 0.98, 0.99)
LAST = (2, 3, 5, 10)  # epochs whose weights are averaged
LARGER = (1.125, 1.25, 1.5)  # times as many pixels a side as in training
# The variable that names what is written: for each state a digit per picture, 1 where right, and what the last weights
# say on average of their first class.
FILE = "TECHNIQUES_FILE"


class Watch(pl.Callback):
    """Evaluates by itself; changes nothing of the fit, whose seconds it makes more.

    Args:
        is_brief: After the last epoch alone, and by its weights alone.
    """

    def __init__(self, is_brief: bool = False) -> None:
        self.is_brief = is_brief

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.right: dict[str, str] = {}
        self.averages = {} if self.is_brief else {decay: _weights(pl_module) for decay in DECAYS}
        self.states: list[dict[str, Tensor]] = []
        self.num_steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.num_steps += 1
        for decay, average in self.averages.items():
            # The usual beginning, or the first weights would stay in a short run's average.
            share = 1 - min(decay, (1 + self.num_steps) / (10 + self.num_steps))
            for name, value in _weights(pl_module, copy=False).items():
                average[name].lerp_(value, share)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.is_brief and trainer.current_epoch + 1 != trainer.max_epochs:
            return
        self.right[f"epoch {trainer.current_epoch + 1}"], self.confidence = _right(
            trainer, pl_module
        )
        self.states = [*self.states[1 - max(LAST) :], _weights(pl_module)]

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not self.is_brief:
            self._look_otherwise(trainer, pl_module)
        Path(os.environ[FILE]).write_text(
            json.dumps({"right": self.right, "confidence": self.confidence}), "utf-8"
        )

    def _look_otherwise(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Evaluate by averages of the weights, and by other views of the pictures."""
        kept = {name: value.clone() for name, value in pl_module.network.state_dict().items()}
        averages = {f"ema {decay}": average for decay, average in self.averages.items()}
        for num in LAST:
            states = self.states[-num:]
            averages[f"mean of {num}"] = {
                name: sum(s[name] for s in states) / len(states) for name in states[0]
            }
        for name, weights in averages.items():
            pl_module.network.load_state_dict(weights, strict=False)
            self.right[name], _ = _right(trainer, pl_module)
        pl_module.network.load_state_dict(kept)
        self.right["flip"], _ = _right(trainer, pl_module, is_flipped=True)
        size: int = trainer.datamodule.eval_image_size  # type: ignore[attr-defined]
        corners = partial(five_crop, size=[size, size])  # and the middle, which alone is usual
        self.right["five crops"] = _right_of_views(trainer, pl_module, resized_side(size), corners)
        for name, side, larger in (
            ("whole", size, 1.0),
            *((f"× {by:g}", resized_side(size), by) for by in LARGER),
        ):
            pixels = round(larger * size)

            def middle(image: Tensor, pixels: int = pixels) -> list[Tensor]:
                return [center_crop(image, [pixels, pixels])]

            self.right[name] = _right_of_views(trainer, pl_module, round(larger * side), middle)


def _weights(module: Any, copy: bool = True) -> dict[str, Tensor]:
    """Return the weights and batch norm's statistics of a network; what counts steps is left out."""
    state = {
        name: value
        for name, value in module.network.state_dict().items()
        if value.is_floating_point()
    }
    return {name: value.clone() for name, value in state.items()} if copy else state


@torch.no_grad()
def _right(trainer: pl.Trainer, module: Any, is_flipped: bool = False) -> tuple[str, float]:
    """Return a digit for each validation picture, 1 where the network is right, and its mean confidence."""
    was_training = module.training
    digits = []
    confidences = []
    module.eval()
    for batch in trainer.datamodule.val_dataloader():  # type: ignore[attr-defined]
        images = module.normalized(batch["image"].to(module.device))
        with trainer.precision_plugin.forward_context():
            logits = [
                module.network(x).float()
                for x in ((images, images.flip(-1)) if is_flipped else (images,))
            ]
        confidence, said = (
            x.cpu() for x in (sum(x.softmax(1) for x in logits) / len(logits)).max(1)
        )
        confidences.append(confidence)
        digits.append("".join(map(str, (said == batch["label"]).int().tolist())))
    module.train(was_training)
    return "".join(digits), round(float(torch.cat(confidences).mean()), 4)


@torch.no_grad()
def _right_of_views(
    trainer: pl.Trainer, module: Any, side: int, views: Callable[[Tensor], Sequence[Tensor]]
) -> str:
    """Return the same, of the mean of what is said of views of a picture whose shorter side was resized to `side`."""
    pictures, was_training = copy.copy(trainer.datamodule.pictures("val")), module.training  # type: ignore[attr-defined]
    pictures.transform = A.Compose([SmallestMaxSize(side)])
    module.eval()
    digits = []
    for item in map(pictures.__getitem__, range(len(pictures))):
        crops = torch.stack([*views(torch.as_tensor(item["image"]).permute(2, 0, 1))])
        with trainer.precision_plugin.forward_context():
            logits = module.network(module.normalized(crops.to(module.device)))
        digits.append(str(int(logits.float().softmax(1).sum(0).argmax() == item["label"])))
    module.train(was_training)
    return "".join(digits)
