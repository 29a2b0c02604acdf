"""The first log lines of a fit: data, network and devices, and warnings about the data. They come before training."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from finetune.data.batch_limits import batches_within, num_within
from finetune.data.checking.checks import faulty_files, first_look
from finetune.data.checking.findings import as_plain
from finetune.data.data_place import is_copied
from finetune.data.datamodule import ImageDataModule
from finetune.data.drawn_splits import straddling_groups, unequal_shares
from finetune.data.file_facts import sizes_of_some
from finetune.data.transforms import cropped_area
from finetune.system.messages import as_wrong_usage, counted
from finetune.training.classifier import Classifier
from finetune.training.optimizers import scale_learning_rates

log = logging.getLogger(__name__)

_NUM_CLASSES_SHOWN = 8
_NUM_KEPT = 5  # examples of each finding in run.json
_SPLITS = ("train", "val", "test")
_FEW = 2  # images of a class, which are too few to train on
# Of an image's area. With the default crop_share, 7/8, a square loses 23 %, a plain photograph of 4:3 43 % and one of
# 3:2 49 % (1 - 2/3 * (7/8)**2), which is what ImageNet's evaluation does, too; 16:9 and longer ones lose 57 % and more.
_MUCH_CROPPED = 0.5
_MANY_CROPPED = 1 / 3  # share of the images that lose more, from which on a line is logged
# validation images, below which an epoch's accuracy and a temperature are uncertain
_FEW_TO_CHOOSE = 50
_FEW_TO_TEST = 30  # with fewer test images the standard error of an accuracy may be above 9 points


def log_overview(
    trainer: pl.Trainer, model: Classifier, data: ImageDataModule, ckpt_path: object = None
) -> dict[str, Any]:
    """Log on rank 0 the data, the network and the device; then each warning in a line.

    Returns:
        The same for run.json, with the number of images of each class and split; nothing on other ranks.
    """
    if not trainer.is_global_zero:
        return {}
    lines = [_image_counts(data)]
    weights = data.splits["train"].weights
    if weights is not None:
        lines.append(f"image weights: {weights.min():.4g} to {weights.max():.4g}, in training only")
    corrections = data.scanned.corrections
    if corrections is not None:
        lines.append(corrections.line())
    lines += [_network(model, ckpt_path), _machine(trainer, model, data)]
    images = replace(data.scanned)  # its lists of all images are not kept during the fit
    findings = first_look(images)
    doubtful = [*data_warnings(data), *few_validation_images(trainer, model, data)]
    doubtful += filter(None, [faulty_files(images, findings)])
    lines += filter(None, [crop_line(data)])
    for split in ("val", "test"):
        if split in data.splits and getattr(trainer, f"limit_{split}_batches") == 0:
            lines.append(f"{split} is skipped, because trainer.limit_{split}_batches is 0")
    for line in lines:
        log.info("%s", line)
    for doubt in doubtful:
        log.warning("%s", doubt)
    return {
        "root": str(data.root),
        "splits": {name: _about_split(data, name) for name in _SPLITS if name in data.splits},
        "lines": lines,
        "doubts": doubtful,
        "first_look": as_plain(findings, images, _NUM_KEPT),
        "fingerprint": data.fingerprint,
        **({} if corrections is None else {"corrections": corrections.plain()}),
    }


def data_warnings(data: ImageDataModule) -> Iterator[str]:
    """Yield a line for each reason why the metrics of a run on these images are unreliable."""
    counts = _counts(data, "train")
    few = [f"{name} {num}" for name, num in counts.items() if num <= _FEW]
    if few:
        yield f"too few training images: {_some(few)}. Add images, or exclude these classes (--data.exclude)"
    for split in ("val", "test"):
        lacking = [name for name, num in _counts(data, split).items() if num == 0]
        # a val or test folder of the user is reported by the first look at the files
        if lacking and split in data.splits and data.splits[split].is_drawn:
            yield f"{split} has no images of {_some(lacking)}: its results do not measure them"
    yield from straddling_groups(data.splits)
    settings = data.settings
    test_fraction = settings.test_fraction if settings.num_folds is None else 1 / settings.num_folds
    fractions = {"val": settings.val_fraction, "test": test_fraction}
    yield from unequal_shares(data.scanned, fractions)
    # the folds of a cross-validation count together
    is_whole = "test" in data.splits and settings.num_folds is None
    if is_whole and (num := len(data.splits["test"])) < _FEW_TO_TEST:
        error = 50 / math.sqrt(num)  # at an accuracy of a half
        metric = "an accuracy" if data.label_kind == "single" else "a share of them"
        yield f"test has only {counted(num, 'image')}: the standard error of {metric} is up to {error:.0f} points"


def few_validation_images(
    trainer: pl.Trainer, model: Classifier, data: ImageDataModule
) -> Iterator[str]:
    """Yield a warning if the best epoch and the temperature are chosen on few validation images."""
    if "val" not in data.splits:
        return
    num = num_within(trainer.limit_val_batches, len(data.splits["val"]), data.batch_size)
    if 0 < num < _FEW_TO_CHOOSE:
        chosen = "temperature" if data.label_kind == "single" else "thresholds"
        if not model.is_solved:  # in a single epoch
            chosen = f"best epoch and the {chosen}"
        yield (
            f"val has only {counted(num, 'image')}: the choice of the {chosen} is uncertain. Use a larger "
            "--data.val_fraction, or more images"
        )


def crop_line(data: ImageDataModule) -> str:
    """Return a line if the crop of evaluation removes much of many images; else ""."""
    settings = data.settings
    sizes = [
        (height, width)
        for height, width in sizes_of_some(data.splits["train"].paths).tolist()
        if min(height, width) > 0
    ]
    cut = np.array([cropped_area(*size, settings.resize, settings.crop_share) for size in sizes])
    much = cut > _MUCH_CROPPED
    if not sizes or much.mean() < _MANY_CROPPED:
        return ""
    return (
        f"evaluation crops the centre: {much.mean():.0%} of {len(sizes)} sampled training images lose more than "
        f"{_MUCH_CROPPED:.0%} of their area (median {np.median(cut):.0%}). "
        "To keep the edges, use --data.resize pad, which pads images to a square, or whole, which squashes them"
    )


def _image_counts(data: ImageDataModule) -> str:
    """Return the place of the images, the size and origin of each split, and the number of images of each class."""
    counts = _counts(data, "train")
    shown = [f"{name} {num:,}" for name, num in counts.items()]
    if len(shown) > _NUM_CLASSES_SHOWN:
        shown = [f"{min(counts.values()):,} to {counted(max(counts.values()), 'image')} each"]
    splits = []
    for split in _SPLITS:
        if split not in data.splits:
            splits.append(f"{split} none")
            continue
        origin = data.scanned.origin(split)
        if data.splits[split].is_drawn:
            origin += f", split_seed {data.settings.split_seed}"
        if split == "test" and data.settings.fold is not None:
            origin += f", fold {data.settings.fold} of {data.settings.num_folds}"
        splits.append(f"{split} {len(data.splits[split]):,}" + (f" ({origin})" if origin else ""))
    classes = f"{len(counts)} classes in train: {', '.join(shown)}"
    if data.label_kind == "several":
        per_image = data.splits["train"].targets.labels.sum(axis=1)
        without = counted(int((per_image == 0).sum()), "image")
        density = f"{per_image.mean():.1f} labels per image, {without} without any"
        classes = f"{density}; {len(counts)} labels in train: {', '.join(shown)}"
    remark = f"; {data.scanned.remark}" if data.scanned.remark else ""
    place = str(data.root)
    if is_copied(place):
        place = f"{place} in {data.scanned.folder}"
    return f"images: {place}: {', '.join(splits)}; {classes}{remark}"


def _network(model: Classifier, ckpt_path: object) -> str:
    """Return the network, the origin of its weights, which parameters are trained, and their learning rates."""
    parameters = [*model.network.parameters()]
    num_all = sum(p.numel() for p in parameters)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    trained = f"{num_trained / 1e6:.2f}" if num_trained >= 10_000 else f"{num_trained:,}"
    freeze = model.hparams["freeze"]
    frozen = [] if freeze is None else [f"the stages up to {freeze}"]
    if model.is_solved:
        frozen = ["everything except the head"]
    elif model.has_fixed_statistics:
        frozen.append("batch norm statistics")
    weights = "random weights" if model.weights is None else f"weights {model.weights}"
    parts = [
        f"network: {model.backbone}, {f'weights of {ckpt_path}' if ckpt_path else weights}",
        f"{trained} of {num_all / 1e6:.2f} million parameters are trained, "
        f"frozen: {' and '.join(frozen) or 'nothing'}",
    ]
    num_stages = model.hparams["head_stages"]
    if num_stages > 1:
        parts.append(f"the head takes the features of the last {num_stages} stages")
    if model.is_solved:
        parts.append("the head is solved exactly")
    elif ckpt_path:
        parts.append("learning rates of the checkpoint")
    else:
        parts.append(_learning_rates(model))
    return "; ".join(parts)


def _learning_rates(model: Classifier) -> str:
    with as_wrong_usage("model.optimizer"):
        # a second optimizer, to read the learning rates from
        optimizer = model.optimizer(model.param_groups())
    scale_learning_rates(optimizer)
    rates = {
        group["name"].removesuffix("_no_decay"): f"{group['lr']:.3g}"
        for group in optimizer.param_groups
    }
    shown = ", ".join(f"{rate} ({name})" for name, rate in rates.items())
    return f"{type(optimizer).__name__} at {shown}"


def _machine(trainer: pl.Trainer, model: Classifier, data: ImageDataModule) -> str:
    kind = trainer.strategy.root_device.type
    num = trainer.num_devices * trainer.num_nodes
    kind = torch.cuda.get_device_name(trainer.strategy.root_device) if kind == "cuda" else kind
    devices = [f"{num} x {kind}", f"precision {trainer.precision}"]
    if model.is_solved:
        return f"training: {', '.join(devices)}"
    num_batches = batches_within(trainer.limit_train_batches, data.num_batches)
    limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
    length = [
        f"{name} {limit}" for name, limit in limits.items() if limit is not None and limit >= 0
    ]
    batches = f"{counted(num_batches, 'batch', 'batches')} of {data.batch_size} an epoch"
    return f"training: {', '.join([*devices, batches, *length])}"


def _counts(data: ImageDataModule, split: str) -> dict[str, int]:
    if split not in data.splits:
        return dict.fromkeys(data.class_names, 0)
    return dict(zip(data.class_names, data.splits[split].targets.counts().tolist(), strict=True))


def _about_split(data: ImageDataModule, split: str) -> dict[str, Any]:
    """Return the entry of a split in run.json. With several labels the counts do not sum to the number of images."""
    samples = data.splits[split]
    about = {"origin": data.scanned.origin(split), "counts": _counts(data, split)}
    return about if data.label_kind == "single" else {**about, "num_images": len(samples)}


def _some(names: list[str]) -> str:
    rest = len(names) - _NUM_CLASSES_SHOWN
    return ", ".join(names[:_NUM_CLASSES_SHOWN]) + (f" and {rest} more classes" if rest > 0 else "")
