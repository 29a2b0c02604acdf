"""The scenarios of test_noise_on_three_devices.py: `elastic_scenarios.py OUT DATA WORLD_SIZE`, for 1 and then for 3.

Every case trains completely, and writes a checkpoint within its second epoch. If there is a checkpoint of another
number of processes, the case also continues from that. Results are in OUT/<name>_<rank>.pt.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from ddp_scenarios import (
    begin,
    order_of_each_rank,
    sgd,
    small_network,
    trainer,
    with_statistics,
)
from networks import few_blocks
from pytorch_lightning.plugins import DoublePrecision
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from finetune import Classifier, ImageFolderData
from finetune.data.dataset import Collate
from finetune.data.mixing import Mixing
from finetune.runs.folder import Run
from finetune.runs.model_checkpoint import Checkpoints
from finetune.training.lr_schedulers import WarmupCosine

# of five steps an epoch, the last on one image: two of three processes have none
AT, STEPS = 7, 10
FROM = {1: 3, 3: 1}  # number of processes: that of the checkpoint from which it continues


def noisy_network(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """A network of LeNet's size with every kind of noise; one dropout stands in two places."""
    twice = nn.Dropout(0.5)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, stride=2),
        nn.Dropout2d(0.2),
        nn.ReLU(),
        StochasticDepth(0.3, "row"),
        StochasticDepth(0.3, "batch"),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        twice,
        nn.Linear(54, 32),
        nn.ReLU(),
        twice,
        nn.Linear(32, num_classes),
    )


@cache
def calibrated(backbone: str) -> nn.Module:
    torch.manual_seed(1)
    return with_statistics(few_blocks(backbone))


def small_mobilenet(*_: Any) -> nn.Module:
    """One with few blocks: dropout, and batch norm that trains."""
    return copy.deepcopy(calibrated("mobilenet"))


def small_efficientnet(*_: Any) -> nn.Module:
    """An EfficientNet with few blocks: dropout, stochastic depth, and squeeze and excitation."""
    return copy.deepcopy(calibrated("efficientnet"))


def pretrained_like(options: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": partial(torch.optim.SGD, lr=1e-3, momentum=0.9), **options}


CASES: dict[str, dict[str, Any]] = {
    "small": {"build": small_network, "class_weights": "balanced"},
    "small_float32": {"build": small_network, "precision": "32-true"},
    "noisy": {"build": noisy_network, "scheduler": WarmupCosine},
    "accumulated": {"build": noisy_network, "accumulate_grad_batches": 2, "steps": 7, "at": 4},
    "mobilenet": pretrained_like(
        {
            "build": small_mobilenet,
            "data": {"image_size": 64},
            "class_weights": "balanced",
            **{"steps": 7, "at": 6},
        }
    ),
    "efficientnet": pretrained_like(
        {"build": small_efficientnet, "freeze_batch_norm": True, "steps": 5, "at": None}
    ),
    "mixed": {
        "build": small_network,
        "class_weights": "balanced",
        "label_smoothing": 0.1,
        "data": {"mixup": 0.4, "cutmix": 1.0, "augmentations": [{"class_path": "TrivialAugment"}]},
    },
    "frozen_part": pretrained_like(
        {"build": small_mobilenet, "freeze": "features", "steps": 7, "at": 6}
    ),
}


class SaveAt(pl.Callback):
    """Writes a checkpoint after a step, as `Checkpoints` does."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if (
            trainer.global_step == self.step
            and not trainer.fit_loop.epoch_loop._should_accumulate()
        ):
            trainer.save_checkpoint(self.path)
            assert (
                trainer.current_epoch == 1
                and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            )


def trained(
    out: Path,
    name: str,
    make_data: Callable[..., ImageFolderData],
    ckpt_path: Path | None = None,
    control: Callable[[], AbstractContextManager] = nullcontext,
) -> dict[str, Tensor]:
    """Train a case and return the weights of this process."""
    options = {"optimizer": sgd, **CASES[name]}
    data = make_data("uneven", 6, **options.pop("data", {}))
    steps, at = options.pop("steps", STEPS), options.pop("at", AT)
    max_epochs = options.pop("max_epochs", -1)
    precision, accumulated = (
        options.pop("precision", "64-true"),
        options.pop("accumulate_grad_batches", 1),
    )
    pl.seed_everything(1, verbose=False)
    with patch("finetune.models.image_classifier.build", options.pop("build")), control():
        model = Classifier(data.class_names, weights=None, **options)
        callbacks: list[pl.Callback] = (
            [SaveAt(out / f"{name}.ckpt", at)] if at and not ckpt_path else []
        )
        has_checkpoints = name == "noisy"
        if has_checkpoints:
            callbacks.append(Checkpoints(Run(out, "fit", path=out / f"run_{name}")))
        fit = trainer(
            precision=precision,
            max_steps=steps,
            max_epochs=max_epochs,
            limit_val_batches=0,
            callbacks=callbacks,
            accumulate_grad_batches=accumulated,
            enable_checkpointing=has_checkpoints,
        )
        fit.fit(model, datamodule=data, ckpt_path=ckpt_path)
    assert fit.global_step == steps
    return {
        name: parameter.detach().clone() for name, parameter in model.network.named_parameters()
    }


def restored_in_float32() -> AbstractContextManager:
    """Control: the network is converted once its weights are there, as Lightning has it, and not before."""
    convert, calls = DoublePrecision.convert_module, []

    def late(self: DoublePrecision, module: nn.Module) -> nn.Module:
        calls.append(module)
        return convert(self, module) if len(calls) > 1 else module

    return patch.object(DoublePrecision, "convert_module", late)


@contextmanager
def partners_of_the_batch() -> Iterator[None]:
    """Control: each image is mixed with the previous one in the per-rank batch, the usual way."""
    collate = Collate.__call__

    def mixed(self: Collate, items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(self, items)
        images, labels = batch["image"].double(), batch["label"]
        batch["image"] = (0.7 * images + 0.3 * images.roll(1, 0)).round().to(torch.uint8)
        return {**batch, "partner_label": labels.roll(1), "share": torch.full((len(labels),), 0.7)}

    with patch.object(Mixing, "draw", lambda *_: None), patch.object(Collate, "__call__", mixed):
        yield


def main() -> None:
    (out, _, data), k = begin(), int(sys.argv[3])

    def save(name: str, result: Any) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.save(result, out / f"{name}_{rank}.pt")

    before = out.parent / f"world{FROM[k]}"
    for name in CASES:
        if out.name == f"world{k}":
            save(name, trained(out, name, data))
        if (before / f"{name}.ckpt").exists():
            save(f"resumed_{name}", trained(out, name, data, before / f"{name}.ckpt"))
    if (before / "mixed.ckpt").exists():
        save(
            "partners_of_the_batch",
            trained(out, "mixed", data, before / "mixed.ckpt", partners_of_the_batch),
        )
    controls = {
        "seeds_of_ranks": ("noisy", lambda: patch("finetune.training.dropout.set_keys")),
        "order_of_ranks": ("small", order_of_each_rank),
        "restored_in_float32": ("small", restored_in_float32),
    }
    for control, (name, context) in controls.items() if k == 3 else ():
        save(control, trained(out, name, data, before / f"{name}.ckpt", context))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
