"""The scenarios of test_three_devices.py and test_devices.py: `ddp_scenarios.py OUT DATA WORLD_SIZE [SCENARIO …]`.

Several processes have torchrun's variables set. Each scenario writes its result to OUT/<name>_<rank>.pt. All share one
process group, since starting costs seconds. With SCENARIO_DEVICE=cuda all processes compute on the first GPU.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from labelled_files import LabelledFiles
from networks import NarrowResNet
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from finetune import Classifier, ImageFolderData
from finetune.data.datamodule import ImageDataModule
from finetune.data.decode import DecodeError
from finetune.data.samplers import TrainBatches, rank_range, train_order
from finetune.data.samples import Samples
from finetune.distributed.sync_batch_norm import share_statistics
from finetune.inference.tta import AverageFlip
from finetune.models.stages import batch_norms, head_name
from finetune.runs.folder import Run
from finetune.runs.predictions import PredictionWriter
from finetune.training.logit_histogram import LogitHistogram
from finetune.training.temperature import Temperature
from finetune.training.threshold import parse_aim

NUM_EVALUATED = (1, 2, 12, 13)
# What only test_devices.py names, on two processes; all else runs where no scenario is named.
CONTROLS_OF_PROMISES = ("control_padding", "control_own_temperature", "control_own_labels")
DEVICE = torch.device(os.environ.get("SCENARIO_DEVICE", "cpu"))
MOVED: list[float] = []  # how far each training has moved the weights, at most


def small_network(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """A network of LeNet's size, without batch norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(144, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def narrow_network(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    return with_statistics(NarrowResNet(num_classes))


def with_statistics(network: nn.Module) -> nn.Module:
    """Give a random network the running statistics of a trained one.

    Without them activations grow from block to block, and training is chaos that blows any rounding up.
    """
    network.train()
    for norm in batch_norms(network):
        norm.momentum = 1.0  # type: ignore[assignment]
    with torch.no_grad():
        network(torch.randn(32, 3, 64, 64))
    return network


def small_normalised(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """A network of LeNet's size with batch norm."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def trainer(**options: Any) -> pl.Trainer:
    world_size, is_cuda = int(sys.argv[3]), DEVICE.type == "cuda"
    # NCCL refuses two processes on one GPU, gloo does not; nor is Lightning to ask for as many GPUs.
    shared = DDPStrategy(
        parallel_devices=[torch.device("cuda", 0)] * world_size, process_group_backend="gloo"
    )
    return pl.Trainer(
        accelerator=DEVICE.type,
        devices=1 if is_cuda else world_size,
        **{
            "strategy": (shared if is_cuda else "ddp") if world_size > 1 else "auto",
            "use_distributed_sampler": False,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def weights_after(
    data: ImageDataModule,
    precision: str,
    build: Callable,
    steps: int = 20,
    num_accumulated: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    """Train and return the trainable weights of this process."""
    pl.seed_everything(1, verbose=False)
    with patch("finetune.models.image_classifier.build", build):
        model = Classifier(
            data.class_names,
            weights=None,
            label_kind=data.label_kind,
            **{"optimizer": sgd, **options},
        )
    before = weights_of(model)
    trainer(
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        accumulate_grad_batches=num_accumulated,
    ).fit(model, datamodule=data)
    after = weights_of(model)
    MOVED.append(moved(model, before, after))
    return after


def weights_of(model: Classifier) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in model.network.named_parameters()
    }


def moved(model: Classifier, before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Return how far training has moved the weights, at most; a probe moves the head by itself."""
    last = head_name(model.network) if model.head_init == "probe" else "none"
    return max(
        float((after[name] - before[name]).abs().max())
        for name in after
        if not name.startswith(last)
    )


@dataclass(frozen=True)
class TornSamples(Samples):
    """Samples of which those in `bad` cannot be decoded."""

    bad: frozenset[int] = frozenset()

    def read(self, index: int) -> np.ndarray:
        if index in self.bad:
            raise DecodeError("torn")
        return super().read(index)


def with_bad_batches(data: ImageFolderData) -> ImageFolderData:
    """Make all images of the first epoch's second batch unreadable, and one of the third."""
    train = data.splits["train"]
    order = train_order(len(train), 1, 0)
    bad = frozenset(int(i) for i in order[data.batch_size : 2 * data.batch_size + 1])
    settings = {field.name: getattr(train, field.name) for field in fields(train)}
    data.splits["train"] = TornSamples(**settings, bad=bad)
    return data


def with_weights(data: Any) -> Any:
    """Give the images weights; that of the last image of the first epoch, which is alone in its batch, is 0."""
    train = data.splits["train"]
    weights = np.random.default_rng(0).uniform(0.2, 5, len(train))
    weights[train_order(len(train), 1, 0)[-1]] = 0
    data.splits["train"] = replace(train, weights=weights)
    return data


@contextmanager
def order_of_each_rank() -> Iterator[None]:
    """Control: every rank shuffles for itself, as a forgotten seed would have it."""

    def batches(self: TrainBatches) -> Iterator[list[tuple[int, int]]]:
        order = train_order(self.num_images, self.seed + self.rank, self.epoch)
        for i in range(self.batch, len(self)):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            yield [
                (self.epoch, int(batch[j]))
                for j in rank_range(len(batch), self.rank, self.world_size)
            ]

    with patch.object(TrainBatches, "__iter__", batches):
        yield


def own_statistics() -> Any:
    """Control: batch norm as DDP leaves it, each device's of its own share."""
    return patch("finetune.training.classifier.share_statistics", lambda *_: None)


def own_features() -> Any:
    """Control: rank 0 fits the head on the images of its own share, and the others take that."""
    return patch("finetune.features.linear_probe.dist.gather_object", lambda *_, **__: None)


@contextmanager
def loss_of(step: Callable[[Classifier, dict, int], Tensor]) -> Iterator[None]:
    """Control: another training step, which measures nothing."""
    nothing = patch.object(Classifier, "on_train_epoch_end", lambda _: None)
    with nothing, patch.object(Classifier, "training_step", step):
        yield


def summed_gradients(model: Classifier, batch: dict, batch_idx: int) -> Tensor:
    """The devices' gradients added up instead of averaged: each adds its mean, DDP's division is taken back."""
    return F.cross_entropy(model(batch["image"]), batch["label"]) * model.trainer.world_size


def own_temperature(root: Path) -> dict[str, Any]:
    """Control: each device fits the temperature of its own share."""
    with patch.object(Temperature, "_sync_dist", lambda *_, **__: None):
        return calibrated(root)


def averaged_means(model: Classifier, batch: dict, batch_idx: int) -> Tensor:
    """The usual way: each device's own mean, whatever its share."""
    if len(batch["label"]) == 0:
        return sum((p * 0).sum() for p in model.parameters())  # type: ignore[return-value]
    weight = model.class_weight.to(model.image_classifier.mean.dtype)
    return F.cross_entropy(
        model(batch["image"]), batch["label"], weight, label_smoothing=model.label_smoothing
    )


def evaluated(
    root: Path,
    out: Path,
    name: str,
    options: Callable[[], dict] = dict,
    callbacks: Any = (),
    **more: Any,
) -> dict[str, Any]:
    """Test metrics and predictions of a fixed network on the images in `root`.

    `options` makes the trainers', both have the `callbacks`; `more` is the data's.
    """
    more = {
        "batch_size": 4,
        "image_size": 32,
        "num_workers": 0,
        "class_names": ["blue", "green", "red"],
        **more,
    }
    data = ImageFolderData(str(root), **more)
    pl.seed_everything(3, verbose=False)
    with patch("finetune.models.image_classifier.build", small_network):
        model = Classifier(data.class_names, weights=None)
    test = trainer(callbacks=[*callbacks], **options())
    test.test(model, datamodule=data, verbose=False)
    metrics = {key: float(value) for key, value in test.callback_metrics.items()}

    run = Run(out, "predict", path=out)
    data = ImageFolderData(predict=str(root / "test"), **more)
    writer = PredictionWriter(run, output=str(out / f"{name}.csv"))
    trainer(callbacks=[writer, *callbacks], **options()).predict(
        model, datamodule=data, return_predictions=False
    )
    return {"metrics": metrics, **model.counts}


def calibrated(root: Path) -> dict[str, Any]:
    """The calibration of a fit on seven validation images in batches of four, which give the ranks unequal parts."""
    data = ImageFolderData(str(root), val_fraction=0.3, batch_size=4, image_size=32, num_workers=0)
    pl.seed_everything(1, verbose=False)
    with patch("finetune.models.image_classifier.build", small_network):
        model = Classifier(
            data.class_names, weights=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.3)
        )
    model.calibrator.aim = parse_aim("f1", data.class_names)
    trainer(precision="64-true", max_epochs=2).fit(model, datamodule=data)
    return model.calibration.as_plain() or {}


def measured_labels(root: Path) -> dict[str, Any]:
    """What a fit on several labels an image finds on 13 validation images, and a test of it on 13 others."""
    data = LabelledFiles(str(root), val_fraction=0.25, batch_size=4, image_size=32, num_workers=0)
    pl.seed_everything(1, verbose=False)
    with patch("finetune.models.image_classifier.build", small_network):
        model = Classifier(
            data.class_names, weights=None, optimizer=sgd, label_kind=data.label_kind
        )
    one = trainer(precision="64-true", max_epochs=2)
    one.fit(model, datamodule=data)
    metrics = {name: float(value) for name, value in one.callback_metrics.items()}
    validated = model.counts
    one.test(model, datamodule=data, verbose=False)
    metrics |= {name: float(value) for name, value in one.callback_metrics.items()}
    calibration = model.calibration.as_plain()
    return {
        "metrics": metrics,
        "counts": [validated, model.counts],
        "calibration": calibration,
        "nums": [len(data.splits[split]) for split in ("val", "test")],
    }


def own_label_counts(root: Path) -> dict[str, Any]:
    """Control: each device measures its own share."""
    with patch.object(LogitHistogram, "_sync_dist", lambda *_, **__: None):
        return measured_labels(root)


def averaged_label_means(model: Classifier, batch: dict, batch_idx: int) -> Tensor:
    """The usual way for several labels: each device's own mean, whatever its share."""
    if len(batch["label"]) == 0:
        return sum((p * 0).sum() for p in model.parameters())  # type: ignore[return-value]
    target = model.task.target(batch)
    logits = model(batch["image"])
    return model.task.loss_sum(logits, target, model.class_weight) / len(logits)


def averaged_weighted_means(model: Classifier, batch: dict, batch_idx: int) -> Tensor:
    """The usual way for images with weights: each device's own weighted mean, whatever its share."""
    target = model.task.target(batch)
    logits = model(batch["image"])  # of no image, too: batch norm waits for every device
    summed = model.task.loss_sum(logits, target, model.class_weight)
    return summed / target.weight(model.class_weight) if len(logits) else summed


def step_under_bf16(num: int, are_shared: bool = True) -> dict[str, Tensor]:
    """Output, gradients and running statistics of a batch of `num` images; a rank may have none."""
    group = torch.distributed if torch.distributed.is_initialized() else None
    own = rank_range(num, group.get_rank() if group else 0, int(sys.argv[3]))
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(channels, 8, 3, padding=1, bias=False) for channels in (3, 8)]
    network = nn.Sequential(
        convolutions[0], nn.BatchNorm2d(8), convolutions[1], nn.BatchNorm2d(8)
    ).to(DEVICE)
    images, slope = torch.randn(num, 3, 9, 9).to(DEVICE), torch.randn(num, 8, 9, 9).to(DEVICE)
    if are_shared:
        share_statistics(network)
    x = images[own.start : own.stop].requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = network(x)
    assert y.dtype == torch.bfloat16 and len(y) == len(own)
    (y.float() * slope[own.start : own.stop]).sum().backward()
    output, gradient = torch.zeros_like(slope), torch.zeros_like(images)
    output[own.start : own.stop], gradient[own.start : own.stop] = y.detach().float(), x.grad
    weights = {name: parameter.grad for name, parameter in network.named_parameters()}
    for part in (output, gradient, *weights.values()) if group else ():
        group.all_reduce(part)
    return {"output": output, "images": gradient, **weights, **dict(network.named_buffers())}


def padded(root: Path) -> float:
    """Control: the number of images that Lightning's own sampler passes to `test`."""
    data = ImageFolderData(
        str(root), image_size=32, num_workers=0, class_names=["blue", "green", "red"]
    )
    loader = data.loader("test")
    with patch("finetune.models.image_classifier.build", small_network):
        model = Classifier(data.class_names, weights=None)
    plain = DataLoader(loader.dataset, batch_size=4, collate_fn=loader.collate_fn)
    trainer(use_distributed_sampler=True).test(model, plain, verbose=False)
    return sum(map(sum, model.counts["confusion_matrix"]))


def begin() -> tuple[Path, Path, Callable[..., ImageFolderData]]:
    """Quieten this process; return OUT, DATA and what makes data of a folder in DATA."""
    out, data_root = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    # what another number of processes left is not to be found
    os.environ["FINETUNE_CACHE"] = str(out / "cache")

    def data(
        root: str = "train", batch_size: int = 12, image_size: int = 32, **more: Any
    ) -> ImageFolderData:
        options = {"batch_size": batch_size, "image_size": image_size, **more}
        return ImageFolderData(str(data_root / root), val_fraction=0, num_workers=0, **options)  # type: ignore[arg-type]

    return out, data_root, data


def labels(data_root: Path, **more: Any) -> LabelledFiles:
    """37 images with several labels, in batches of 6: the last batch has one image, and two of three devices none."""
    options = {"batch_size": 6, "image_size": 32, "val_fraction": 0.0, "num_workers": 0, **more}
    return LabelledFiles(str(data_root / "labels"), **options)  # type: ignore[arg-type]


NARROW: dict[str, Any] = {
    "build": narrow_network,
    "steps": 10,
    "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}
BALANCED: dict[str, Any] = {
    "class_weights": "balanced",
    "label_smoothing": 0.1,
    "build": small_network,
}
WEIGHTED: dict[str, Any] = {**BALANCED, "build": small_normalised, "num_accumulated": 2}
SOLVED: dict[str, Any] = {
    **BALANCED,
    "build": narrow_network,
    "freeze": "backbone",
    "head_stages": 3,
}


def main() -> None:
    (out, data_root, data), world_size = begin(), int(sys.argv[3])
    scenarios: dict[str, Callable[[], Any]] = {
        "small_float64": lambda: weights_after(data(), "64-true", build=small_network),
        "small_float32": lambda: weights_after(data(), "32-true", build=small_network),
        "resnet_float64": lambda: weights_after(
            data(), "64-true", freeze_batch_norm=True, **NARROW
        ),
        "resnet_float32": lambda: weights_after(
            data(), "32-true", freeze_batch_norm=True, **NARROW
        ),
        "trained_batch_norm": lambda: weights_after(data(), "64-true", **NARROW),
        "batch_norm_uneven": lambda: weights_after(
            data("uneven", 6), "64-true", build=small_normalised
        ),
        "bad_batches": lambda: weights_after(
            with_bad_batches(data("uneven", 6, on_bad_image="skip")),
            "64-true",
            build=small_normalised,
        ),
        "balanced": lambda: weights_after(data("uneven", 6), "64-true", **BALANCED),
        "weighted": lambda: weights_after(
            with_weights(data("uneven", 6, mixup=0.4, cutmix=1.0)), "64-true", **WEIGHTED
        ),
        "weighted_head": lambda: weights_after(
            with_weights(data("uneven", 6)), "64-true", freeze="backbone", **BALANCED
        ),
        "labels_weighted": lambda: weights_after(
            with_weights(labels(data_root, mixup=0.4)), "64-true", **BALANCED
        ),
        "probe": lambda: weights_after(data(), "64-true", head_init="probe", build=small_network),
        "solved_head": lambda: weights_after(data("uneven", 6), "64-true", **SOLVED),
        "calibrated": lambda: calibrated(data_root / "two"),
        "frozen_part": lambda: weights_after(data(), "64-true", freeze="layer3", **NARROW),
        "members": lambda: weights_after(
            data("uneven", 6), "64-true", build=small_normalised, members=2
        ),
        "labels": lambda: weights_after(
            labels(data_root, mixup=0.4, cutmix=1.0), "64-true", **BALANCED
        ),
        "labels_head": lambda: weights_after(
            labels(data_root), "64-true", freeze="backbone", **BALANCED
        ),
        "labels_members": lambda: weights_after(
            labels(data_root), "64-true", build=small_normalised, members=2
        ),
        "labels_measured": lambda: measured_labels(data_root / "many_labels"),
        "bf16_2": lambda: step_under_bf16(2),
        "bf16_1": lambda: step_under_bf16(1),
    }
    if world_size > 1:

        def control(context: Any, *arguments: Any, **options: Any) -> dict[str, Tensor]:
            with context:
                return weights_after(*arguments, **options)

        small: dict[str, Any] = {"build": small_network}
        scenarios |= {
            "control_order": lambda: control(order_of_each_rank(), data(), "64-true", **small),
            "control_sum": lambda: control(loss_of(summed_gradients), data(), "64-true", **small),
            "control_own_statistics": lambda: control(
                own_statistics(), data(), "64-true", **NARROW
            ),
            "control_members": lambda: control(
                own_statistics(), data("uneven", 6), "64-true", build=small_normalised, members=2
            ),
            "control_own_features": lambda: control(
                own_features(), data("uneven", 6), "64-true", **SOLVED
            ),
            "control_own_labels": lambda: own_label_counts(data_root / "many_labels"),
            "control_own_temperature": lambda: own_temperature(data_root / "two"),
            "control_bf16": lambda: step_under_bf16(2, are_shared=False),
            "control_padding": lambda: padded(data_root / "test13"),
        }
        scenarios["control_weighted_means"] = lambda: control_means(
            with_weights(data("uneven", 6, mixup=0.4, cutmix=1.0)),
            WEIGHTED,
            averaged_weighted_means,
        )
        scenarios["control_means"] = lambda: control_means(data("uneven", 6), BALANCED)
        scenarios["control_label_means"] = lambda: control_means(
            labels(data_root, mixup=0.4, cutmix=1.0), BALANCED, averaged_label_means
        )
    last = data_root / f"test{NUM_EVALUATED[-1]}"
    scenarios["evaluated_flipped"] = lambda: evaluated(
        last, out, "evaluated_flipped", callbacks=[AverageFlip()]
    )
    scenarios["evaluated_larger"] = lambda: evaluated(
        last, out, "evaluated_larger", eval_image_size=40
    )
    for num in NUM_EVALUATED:
        scenarios[f"evaluated_{num}"] = lambda num=num: evaluated(
            data_root / f"test{num}", out, f"evaluated_{num}"
        )
    chosen = sys.argv[4:] or [name for name in scenarios if name not in CONTROLS_OF_PROMISES]
    for name in chosen:
        if name not in scenarios:  # a control of another number of processes
            continue
        result = scenarios[name]()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.save(result, out / f"{name}_{rank}.pt")
        if MOVED:
            torch.save(MOVED.pop(), out / f"{name}_moved_{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def control_means(
    data: ImageDataModule, options: dict[str, Any], step: Callable = averaged_means
) -> dict[str, Tensor]:
    with loss_of(step):
        return weights_after(data, "64-true", **options)


if __name__ == "__main__":
    main()
