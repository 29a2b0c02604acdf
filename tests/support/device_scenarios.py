"""Trainings and measurements that end alike on any number of devices: `device_scenarios.py OUT DATA WORLD_SIZE NAME…`.

Several processes have torchrun's variables set. Each scenario writes its result to OUT/<name>_<rank>.pt. All share one
process group, since starting costs seconds. With SCENARIO_DEVICE=cuda all processes compute on the first GPU.

A training with `saved_at` writes a checkpoint within its second epoch; `resumed_NAME` goes on from the one that another
world has written.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytorch_lightning as pl
import torch
from labelled_files import LabelledFiles
from networks import NarrowResNet, few_blocks
from pytorch_lightning.plugins import DoublePrecision
from pytorch_lightning.strategies import DDPStrategy
from small_timm import FAMILIES
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.ops import StochasticDepth

from finetune import Classifier, ImageFolderData
from finetune.data.dataset import Collate
from finetune.data.decode import DecodeError
from finetune.data.mixing import Mixing
from finetune.data.samplers import TrainBatches, rank_range, train_order
from finetune.data.samples import Samples
from finetune.distributed.sync_batch_norm import share_statistics
from finetune.inference.tta import AverageFlip
from finetune.models.stages import batch_norms, head_name
from finetune.runs.folder import Run
from finetune.training.loss import target_of
from finetune.training.lr_schedulers import WarmupCosine
from finetune.training.prediction_files import PredictionWriter
from finetune.training.prediction_rows import Rows
from finetune.training.threshold import parse_aim

_given = sys.argv[1:4] if __name__ == "__main__" else ["", "", "1"]
OUT, DATA, WORLD_SIZE = Path(_given[0]), Path(_given[1]), int(_given[2])
DEVICE = torch.device(os.environ.get("SCENARIO_DEVICE", "cpu"))
NAMES = ["blue", "green", "red"]


# Networks


def small(num_classes: int) -> nn.Module:
    """A network of LeNet's size, without batch norm and dropout."""
    first, second = nn.Conv2d(3, 6, 5, stride=2), nn.Conv2d(6, 16, 5, stride=2)
    convolutions = (first, nn.ReLU(), second, nn.ReLU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(3), *two_layers(144, num_classes))


def normalised(num_classes: int) -> nn.Module:
    """A network of LeNet's size with batch norm."""
    first = (nn.Conv2d(3, 16, 5, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    second = (nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(2), *two_layers(128, num_classes))


def noisy(num_classes: int) -> nn.Module:
    """A network of LeNet's size with every kind of noise; one dropout stands in two places."""
    twice = nn.Dropout(0.5)
    convolution = (nn.Conv2d(3, 6, 5, stride=2), nn.Dropout2d(0.2), nn.ReLU())
    depth = (StochasticDepth(0.3, "row"), StochasticDepth(0.3, "batch"), nn.AdaptiveAvgPool2d(3))
    flatten, first, relu, second = two_layers(54, num_classes)
    return nn.Sequential(*convolution, *depth, flatten, twice, first, relu, twice, second)


def two_layers(num_features: int, num_classes: int) -> tuple[nn.Module, ...]:
    return nn.Flatten(), nn.Linear(num_features, 32), nn.ReLU(), nn.Linear(32, num_classes)


def narrow(num_classes: int) -> nn.Module:
    return with_statistics(NarrowResNet(num_classes))


def few(backbone: str, _: int) -> nn.Module:
    torch.manual_seed(1)
    return with_statistics(few_blocks(backbone))


def with_statistics(network: nn.Module, image_size: int = 64) -> nn.Module:
    """Give a random network the running statistics of a trained one.

    Without them activations grow from block to block, and training is chaos that blows any rounding up.
    """
    norms = batch_norms(network)
    moments = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # type: ignore[assignment]
    with torch.no_grad():
        network.train()(torch.randn(32, 3, image_size, image_size))
    for norm, moment in zip(norms, moments, strict=True):
        norm.momentum = moment  # type: ignore[assignment]
    return network


# Data


def images(root: str = "uneven", batch_size: int = 6, **more: Any) -> ImageFolderData:
    options = {"batch_size": batch_size, "image_size": 32, "val_fraction": 0, **more}
    return ImageFolderData(str(DATA / root), num_workers=0, **options)


def labelled(**more: Any) -> LabelledFiles:
    """37 images with several labels, in batches of 6: the last batch has one image, and two of three devices none."""
    options = {"batch_size": 6, "image_size": 32, "val_fraction": 0.0, "num_workers": 0, **more}
    return LabelledFiles(str(DATA / "labels"), **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TornSamples(Samples):
    """Samples of which those in `bad` cannot be decoded."""

    bad: frozenset[int] = frozenset()

    def read(self, index: int) -> np.ndarray:
        if index in self.bad:
            raise DecodeError("torn")
        return super().read(index)


def with_bad_batches() -> ImageFolderData:
    """Make all images of the first epoch's second batch unreadable, and one of the third."""
    data = images(on_bad_image="skip")
    train = data.splits["train"]
    order = train_order(len(train), 1, 0)
    bad = frozenset(int(i) for i in order[data.batch_size : 2 * data.batch_size + 1])
    settings = {each.name: getattr(train, each.name) for each in fields(train)}
    data.splits["train"] = TornSamples(**settings, bad=bad)
    return data


def with_weights(data: Any) -> Any:
    """Give the images weights; that of the last image of the first epoch, which is alone in its batch, is 0."""
    train = data.splits["train"]
    weights = np.random.default_rng(0).uniform(0.2, 5, len(train))
    weights[train_order(len(train), 1, 0)[-1]] = 0
    data.splits["train"] = replace(train, weights=weights)
    return data


# Trainings


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes:
        network: Makes it, for a number of classes, or is the name of a backbone.
        data: Makes the data.
        precision: As Lightning's.
        steps: The number of its steps.
        saved_at: The step after which a checkpoint is written; None for none.
        num_accumulated: The number of batches of a step.
        model: Further arguments of `Classifier`.
    """

    network: Callable[[int], nn.Module] | str = small
    data: Callable[[], Any] = images
    precision: str = "64-true"
    steps: int = 10
    saved_at: int | None = None
    num_accumulated: int = 1
    model: dict[str, Any] = field(default_factory=dict)


def sgd(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9)


BALANCED = {"class_weights": "balanced", "label_smoothing": 0.1}
SLOW = {"optimizer": sgd(1e-3)}  # of networks that are like pretrained ones
FROZEN = {"freeze": "backbone"}
MIXED = {"mixup": 0.4, "cutmix": 1.0}
TRAIN = partial(images, "train", 12)
TRAININGS = {
    "small_float64": Training(data=TRAIN),
    "small_float32": Training(precision="32-true", saved_at=7),
    "resnet_float32": Training(
        narrow, TRAIN, "32-true", steps=5, model={**SLOW, "freeze_batch_norm": True}
    ),
    "trained_batch_norm": Training(narrow, TRAIN, steps=5, model=SLOW),
    "batch_norm_uneven": Training(normalised),
    "bad_batches": Training(normalised, with_bad_batches),
    "balanced": Training(saved_at=7, model=BALANCED),
    "mixed": Training(
        data=partial(images, **MIXED, augmentations=[{"class_path": "TrivialAugment"}]),
        saved_at=7,
        model=BALANCED,
    ),
    "weighted": Training(
        normalised, lambda: with_weights(images(**MIXED)), num_accumulated=2, model=BALANCED
    ),
    "solved_head": Training(
        narrow,
        lambda: with_weights(images()),
        steps=5,
        model={**BALANCED, **FROZEN, **SLOW, "head_stages": 3},
    ),
    "probe": Training(data=TRAIN, model={"head_init": "probe"}),
    "frozen_part": Training(narrow, TRAIN, saved_at=9, model={**SLOW, "freeze": "layer3"}),
    "labels": Training(data=lambda: with_weights(labelled(**MIXED)), model=BALANCED),
    "labels_head": Training(data=labelled, model={**BALANCED, **FROZEN}),
    "noisy": Training(noisy, saved_at=7, model={"scheduler": WarmupCosine}),
    "mobilenet": Training(
        partial(few, "mobilenet"),
        partial(images, image_size=64),
        steps=7,
        saved_at=6,
        model={**SLOW, "class_weights": "balanced"},
    ),
    "efficientnet": Training(
        partial(few, "efficientnet"), steps=5, model={**SLOW, "freeze_batch_norm": True}
    ),
}
SAVED = [name for name, training in TRAININGS.items() if training.saved_at]
TIMM = {
    f"timm_{name}": Training(backbone, partial(TRAIN, image_size=size), steps=2, model=SLOW)
    for name, (backbone, size) in FAMILIES.items()
}
TIMM["timm_frozen"] = replace(
    TIMM["timm_mobilenetv4"],
    steps=6,
    model={**SLOW, "freeze": "blocks.2", "freeze_batch_norm": True},
)


class SaveAt(pl.Callback):
    """Writes a checkpoint after a step, as `Checkpoints` does."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            progress = trainer.fit_loop.epoch_loop.batch_progress
            assert trainer.current_epoch == 1 and not progress.is_last_batch


def trainer(**options: Any) -> pl.Trainer:
    is_cuda = DEVICE.type == "cuda"
    # NCCL refuses two processes on one GPU, gloo does not; nor is Lightning to ask for as many GPUs.
    shared = DDPStrategy(
        parallel_devices=[torch.device("cuda", 0)] * WORLD_SIZE, process_group_backend="gloo"
    )
    return pl.Trainer(
        accelerator=DEVICE.type,
        devices=1 if is_cuda else WORLD_SIZE,
        **{
            "strategy": (shared if is_cuda else "ddp") if WORLD_SIZE > 1 else "auto",
            "use_distributed_sampler": False,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )


def classifier(data: Any, network: Callable[[int], nn.Module] | str, **options: Any) -> Classifier:
    options = {"weights": None, "label_kind": data.label_kind, "optimizer": sgd(0.01), **options}
    if isinstance(network, str):
        model = Classifier(data.class_names, network, network_size=data.image_size, **options)
        with_statistics(model.network, data.image_size)
        return model

    def build(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
        return network(num_classes)

    with patch("finetune.models.image_classifier.build", build):
        return Classifier(data.class_names, **options)


def trained(name: str, ckpt_path: Path | None = None) -> dict[str, Any]:
    """Train, or go on, and return the trainable weights of this process and how far they have moved, at most."""
    training = (TRAININGS | TIMM)[name]
    data = training.data()
    pl.seed_everything(1, verbose=False)
    model = classifier(data, training.network, **training.model)
    before = weights_of(model)
    callbacks: list[pl.Callback] = []
    if training.saved_at and ckpt_path is None:
        callbacks.append(SaveAt(OUT / f"{name}.ckpt", training.saved_at))
    trainer(
        precision=training.precision,
        max_steps=training.steps,
        max_epochs=-1,
        limit_val_batches=0,
        accumulate_grad_batches=training.num_accumulated,
        callbacks=callbacks,
    ).fit(model, datamodule=data, ckpt_path=ckpt_path)
    after = weights_of(model)
    # a probe moves the head by itself
    last = head_name(model.network) if model.head_init == "probe" else "none"
    moved = [float((after[key] - before[key]).abs().max()) for key in after if key.find(last) != 0]
    return {"weights": after, "moved": max(moved)}


def weights_of(model: Classifier) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in model.network.named_parameters()
    }


def resumed(name: str) -> dict[str, Any]:
    """Go on with a training from the newest checkpoint of another world."""
    found = [path for path in OUT.parent.glob(f"*/{name}.ckpt") if path.parent != OUT]
    return trained(name, max(found, key=lambda path: path.stat().st_mtime_ns))


# Measurements


def evaluated(number: int, name: str, callbacks: Any = (), **more: Any) -> dict[str, Any]:
    """Test metrics and predictions of a fixed network on a number of images; `more` is the data's."""
    root = DATA / f"test{number}"
    options = {"batch_size": 4, "image_size": 32, "num_workers": 0, "class_names": NAMES, **more}
    data = ImageFolderData(str(root), **options)
    pl.seed_everything(3, verbose=False)
    model = classifier(data, small)
    test = trainer(callbacks=[*callbacks])
    test.test(model, datamodule=data, verbose=False)
    metrics = {key: float(value) for key, value in test.callback_metrics.items()}
    data = ImageFolderData(predict=str(root / "test"), **options)
    run = Run(OUT, "predict", path=OUT)
    writer = PredictionWriter(run, Rows(model.rule), str(OUT / f"{name}.csv"))
    predict = trainer(callbacks=[writer, *callbacks])
    predict.predict(model, datamodule=data, return_predictions=False)
    return {"metrics": metrics, **model.counts}


def padded() -> float:
    """Return the number of images that Lightning's own sampler passes to `test`."""
    data = images("test13", 4, class_names=NAMES)
    loader = data.loader("test")
    plain = DataLoader(loader.dataset, batch_size=4, collate_fn=loader.collate_fn)
    model = classifier(data, small)
    trainer(use_distributed_sampler=True).test(model, plain, verbose=False)
    return sum(map(sum, model.counts["confusion_matrix"]))


def calibrated() -> dict[str, Any]:
    """The calibration of a fit on seven validation images in batches of four, which give the ranks unequal parts."""
    data = images("two", 4, val_fraction=0.3)
    pl.seed_everything(1, verbose=False)
    model = classifier(data, small, optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
    model.aim = parse_aim("f1", data.class_names)
    trainer(precision="64-true", max_epochs=2).fit(model, datamodule=data)
    return model.calibration.as_plain() or {}


def measured_labels() -> dict[str, Any]:
    """What a fit on several labels an image finds on 13 validation images, and a test of it on 13 others."""
    root = str(DATA / "many_labels")
    data = LabelledFiles(root, val_fraction=0.25, batch_size=4, image_size=32, num_workers=0)
    pl.seed_everything(1, verbose=False)
    model = classifier(data, small)
    one = trainer(precision="64-true", max_epochs=2)
    one.fit(model, datamodule=data)
    metrics = {name: float(value) for name, value in one.callback_metrics.items()}
    validated = model.counts
    one.test(model, datamodule=data, verbose=False)
    metrics |= {name: float(value) for name, value in one.callback_metrics.items()}
    return {
        "metrics": metrics,
        "counts": [validated, model.counts],
        "calibration": model.calibration.as_plain(),
        "nums": [len(data.splits[split]) for split in ("val", "test")],
    }


def step_under_bf16(num: int, are_shared: bool = True) -> dict[str, Tensor]:
    """Output, gradients and running statistics of a batch of `num` images; a rank may have none."""
    group = torch.distributed if torch.distributed.is_initialized() else None
    own = rank_range(num, group.get_rank() if group else 0, WORLD_SIZE)
    torch.manual_seed(0)
    first, second = (nn.Conv2d(channels, 8, 3, padding=1, bias=False) for channels in (3, 8))
    network = nn.Sequential(first, nn.BatchNorm2d(8), second, nn.BatchNorm2d(8)).to(DEVICE)
    x, slope = torch.randn(num, 3, 9, 9).to(DEVICE), torch.randn(num, 8, 9, 9).to(DEVICE)
    output, gradient = torch.zeros_like(slope), torch.zeros_like(x)
    if are_shared:
        share_statistics(network)
    x = x[own.start : own.stop].requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = network(x)
    assert y.dtype == torch.bfloat16 and len(y) == len(own)
    (y.float() * slope[own.start : own.stop]).sum().backward()
    output[own.start : own.stop] = y.detach().float()
    gradient[own.start : own.stop] = x.grad
    weights = {name: parameter.grad for name, parameter in network.named_parameters()}
    for part in (output, gradient, *weights.values()) if group else ():
        group.all_reduce(part)
    return {"output": output, "images": gradient, **weights, **dict(network.named_buffers())}


# Deliberate mistakes


def order_of_each_rank() -> Any:
    """Every rank shuffles for itself, as a forgotten seed would have it."""

    def batches(self: TrainBatches) -> Iterator[list[tuple[int, int]]]:
        order = train_order(self.num_images, self.seed + self.rank, self.epoch)
        for i in range(self.batch, len(self)):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            own = rank_range(len(batch), self.rank, self.world_size)
            yield [(self.epoch, int(batch[j])) for j in own]

    return patch.object(TrainBatches, "__iter__", batches)


def own_statistics() -> Any:
    """Batch norm as DDP leaves it, each device's of its own share."""
    return patch("finetune.training.classifier.share_statistics", lambda *_: None)


def own_share() -> Any:
    """Rank 0 fits the head, or measures, on the images of its own share, and the others take that."""
    return patch("finetune.distributed.collectives.dist.gather_object", lambda *_, **__: None)


@contextmanager
def own_means() -> Iterator[None]:
    """The usual way: each device's own weighted mean, whatever its share. It measures nothing."""

    def step(model: Classifier, batch: dict[str, Any], batch_idx: int) -> Tensor:
        target = target_of(batch)
        logits = model(batch["image"])  # of no image, too: batch norm waits for every device
        summed = model.task.loss_sum(logits, target, model.class_weight)
        return summed / target.weight(model.class_weight) if len(logits) else summed

    nothing = patch.object(Classifier, "on_train_epoch_end", lambda _: None)
    with nothing, patch.object(Classifier, "training_step", step):
        yield


@contextmanager
def summed_gradients() -> Iterator[None]:
    """The devices' gradients added up instead of averaged: DDP's division is taken back."""
    training_step = Classifier.training_step

    def step(model: Classifier, *batch: Any) -> Tensor:
        return training_step(model, *batch) * model.trainer.world_size

    with patch.object(Classifier, "training_step", step):
        yield


def seeds_of_ranks() -> Any:
    """Dropout draws from torch's generator, which each rank has for itself."""
    return patch("finetune.training.dropout.set_keys")


def restored_in_float32() -> Any:
    """The network is converted once its weights are there, as Lightning has it, and not before."""
    convert, calls = DoublePrecision.convert_module, []

    def late(self: DoublePrecision, module: nn.Module) -> nn.Module:
        calls.append(module)
        return convert(self, module) if len(calls) > 1 else module

    return patch.object(DoublePrecision, "convert_module", late)


@contextmanager
def partners_of_the_batch() -> Iterator[None]:
    """Each image is mixed with the previous one in the per-rank batch, the usual way."""
    collate = Collate.__call__

    def mixed(self: Collate, items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(self, items)
        pixels, labels = batch["image"].double(), batch["label"]
        batch["image"] = (0.7 * pixels + 0.3 * pixels.roll(1, 0)).round().to(torch.uint8)
        return {**batch, "partner_label": labels.roll(1), "share": torch.full((len(labels),), 0.7)}

    with patch.object(Mixing, "draw", lambda *_: None), patch.object(Collate, "__call__", mixed):
        yield


def own_draws_of_timm() -> Any:
    """The layers of timm draw for themselves, seeded by rank."""
    return patch.dict(sys.modules, {"timm.layers": None})


Scenario = Callable[[], Any]


def under(mistake: Callable[[], AbstractContextManager[Any]], scenario: Scenario) -> Scenario:
    def run() -> Any:
        with mistake():
            return scenario()

    return run


NUM_EVALUATED = (1, 13)
MEASURED: dict[str, Scenario] = {
    "calibrated": calibrated,
    "labels_measured": measured_labels,
    "bf16_2": partial(step_under_bf16, 2),
    "bf16_1": partial(step_under_bf16, 1),
    **{f"evaluated_{num}": partial(evaluated, num, f"evaluated_{num}") for num in NUM_EVALUATED},
    "evaluated_flipped": lambda: evaluated(13, "evaluated_flipped", [AverageFlip()]),
    "evaluated_groups": partial(evaluated, 13, "evaluated_groups", group_by=r"(\w+)/\d"),
}
CONTROLS: dict[str, Scenario] = {
    "control_order": under(order_of_each_rank, partial(trained, "small_float64")),
    "control_sum": under(summed_gradients, partial(trained, "small_float64")),
    "control_own_statistics": under(own_statistics, partial(trained, "trained_batch_norm")),
    "control_own_features": under(own_share, partial(trained, "solved_head")),
    "control_means": under(own_means, partial(trained, "balanced")),
    "control_weighted_means": under(own_means, partial(trained, "weighted")),
    "control_label_means": under(own_means, partial(trained, "labels")),
    "control_own_temperature": under(own_share, calibrated),
    "control_own_labels": under(own_share, measured_labels),
    "control_own_groups": under(
        own_share, partial(evaluated, 13, "control_own_groups", group_by=r"(\w+)/\d")
    ),
    "control_bf16": partial(step_under_bf16, 2, are_shared=False),
    "control_padding": padded,
    "control_seeds": under(seeds_of_ranks, partial(trained, "noisy")),
    "control_restored": under(restored_in_float32, partial(resumed, "balanced")),
    "control_partners": under(partners_of_the_batch, partial(trained, "mixed")),
    "control_timm_statistics": under(own_statistics, partial(trained, "timm_mobilenetv4")),
    "control_timm_draws": under(own_draws_of_timm, partial(trained, "timm_focalnet")),
}
SCENARIOS: dict[str, Scenario] = {
    **{name: partial(trained, name) for name in TRAININGS | TIMM},
    **{f"resumed_{name}": partial(resumed, name) for name in SAVED},
    **MEASURED,
    **CONTROLS,
}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    # what another number of processes left is not to be found
    os.environ["FINETUNE_CACHE"] = str(OUT / "cache")
    for name in sys.argv[4:]:
        result = SCENARIOS[name]()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.save(result, OUT / f"{name}_{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
