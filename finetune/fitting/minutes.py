"""`--minutes M`: choose epochs and image size of a fit, so that it ends in time."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pytorch_lightning.utilities.seed import isolate_rng

from finetune.data.batch_limits import num_within
from finetune.data.datamodule import ImageDataModule, open_data
from finetune.distributed.launch import num_local_devices
from finetune.features.familiarity import MOST_IMAGES, num_averaged
from finetune.fitting.build import arguments_in_effect, build_model, one_device, takes
from finetune.fitting.plan import Plan
from finetune.fitting.time_budget import (
    Costs,
    TrainingLength,
    Work,
    longest_training,
    measure,
)
from finetune.models.image_classifier import check_first_pass
from finetune.models.network_names import is_timm
from finetune.settings.layers import Layers, replaced
from finetune.settings.schema import FitSettings
from finetune.system.messages import counted
from finetune.system.progress import duration
from finetune.training.classifier import Classifier
from finetune.training.precision import automatic_precision
from finetune.training.run_length import fewest_epochs

_MOST_EPOCHS = 100  # if the user sets no limit
_ENDING = 2.5  # seconds for what is written at the end, most of all the report
# the default, and smaller sizes at which pretrained networks are still accurate
_SIZES = (224, 192, 160, 128)


def settle_minutes(plan: Plan, layers: Layers, began: float) -> Plan:
    """Return the plan of a new fit with the length that ends in time, in place of the minutes.

    Folds or members share the time equally. All of them have the length that is measured on the first.

    Args:
        plan: Its settings have `minutes`.
        layers: Who has set what.
        began: `time.monotonic` when the command began.
    """
    settings = plan.settings
    assert settings.minutes is not None, "only of a fit with minutes"
    seconds = 60 * settings.minutes / settings.num_fits
    # The processes of other devices take as long to start as this one, which alone ranks networks.
    start = time.monotonic() - began - (plan.ranking["seconds"] if plan.ranking else 0.0)
    num_devices = num_local_devices(settings.trainer.devices, settings.trainer.accelerator)
    end = began + seconds - (start if num_devices > 1 else 0.0)
    with isolate_rng():  # the measurement must not change the random numbers of the fit
        data = open_data(settings.data)
        model = build_model(settings.model, data)
        if settings.threshold is not None:
            model.task.parse_aim(settings.threshold)  # so that an error comes before the work
        precision = settings.trainer.precision or automatic_precision(
            settings.trainer.accelerator, None, is_resumed=False, network=model.network
        )
        work = _work(settings, data)
        trainer = one_device(replaced(settings.trainer, {"precision": precision}), {})
        costs = measure(model, data, trainer, num_devices, seconds, end - time.monotonic())
    sizes = _sizes(settings, layers, model)
    besides = costs.start + _ENDING + work.evaluated * (costs.evaluate + costs.decode)
    left = end - time.monotonic() - besides
    size, training = _longest_fit(costs, left, work, sizes, _most_epochs(settings))
    values: dict[str, Any] = {
        "minutes": None,
        "trainer.max_epochs": training.epochs,
        "trainer.limit_train_batches": training.batches,
        "trainer.precision": precision,
    }
    if takes(settings.data, "image_size"):
        values["data.image_size"] = size
    if takes(settings.data, "cache_limit_gb") and data.cache_limit_gb == 0:
        values["data.cache_limit_gb"] = 0.0
    note = _note(size, training, work, settings, began)
    if training.seconds > left:
        late = duration(training.seconds - left)
        note += f", and {duration(besides)} for all else, so the fit ends about {late} late"
    return plan.put(values, note)


def _longest_fit(
    costs: Costs, left: float, work: Work, sizes: Iterator[int], most: int
) -> tuple[int, TrainingLength]:
    """Return image size and length of the longest fit within a time.

    The size is the first with which the fit sees its images often enough.

    Args:
        costs: The costs with images of the first size.
        left: Seconds for training and validation.
        work: The images of the fit.
        sizes: Sides of images in pixels, from the largest down. Without enough time for any, the last one is chosen.
        most: The most epochs.
    """
    measured = None
    for size in sizes:
        measured = measured or size
        scaled = costs.at_scale(size / measured)
        training = longest_training(
            left,
            batch=scaled.train * work.batch_size,
            between=scaled.between + work.validated * scaled.evaluate,
            num_images=work.train,
            batch_size=work.batch_size,
            most=most,
        )
        # half of the fewest epochs of a fit of default length
        if 2 * training.seen >= work.train * fewest_epochs(work.train):
            break
    return size, training


def _work(settings: FitSettings, data: ImageDataModule) -> Work:
    """Return how many images a fit trains on, validates in an epoch, and tests."""
    trainer = settings.trainer
    batch_size = data.batch_size
    num = {split: len(samples) for split, samples in data.splits.items()}
    validated = num_within(trainer.limit_val_batches, num.get("val", 0), batch_size)
    share = trainer.val_check_interval  # of an epoch; `check_minutes` refuses a number of batches
    validations = (1 if share is None else 1 // share) / (trainer.check_val_every_n_epoch or 1)
    tested = num_within(trainer.limit_test_batches, num.get("test", 0), batch_size)
    familiar = 0
    if data.label_kind == "single" and validated:
        familiar = num_averaged(num["train"], len(data.class_names)) + min(num["val"], MOST_IMAGES)
    return Work(
        train=num.get("train", 0),
        batch_size=batch_size,
        validated=validations * validated,
        evaluated=(tested if settings.test_after_fit else 0) + familiar,
    )


def _note(
    size: int, training: TrainingLength, work: Work, settings: FitSettings, began: float
) -> str:
    """Return the note about the choice."""
    part = f" of {counted(training.batches, 'batch', 'batches')} each" if training.batches else ""
    batches = training.batches or math.ceil(work.train / work.batch_size)
    steps = training.epochs * math.ceil(batches / settings.trainer.accumulate_grad_batches)
    text = f"{counted(training.epochs, 'epoch')}{part}, {counted(steps, 'step')}, with images of {size} pixels"
    took = duration(time.monotonic() - began)
    text += f": about {duration(training.seconds)} on this machine, after {took} so far"
    if training.epochs == _most_epochs(settings):
        text += f"; {counted(training.epochs, 'epoch')} at most"
    return text


def _most_epochs(settings: FitSettings) -> int:
    """Return the limit of the number of epochs: that of the user, or our own."""
    epochs = settings.trainer.max_epochs
    return _MOST_EPOCHS if epochs is None or epochs < 0 else epochs


def _sizes(settings: FitSettings, layers: Layers, model: Classifier) -> Iterator[int]:
    """Yield the image size of a fit, and smaller ones if it may be reduced and the network supports them.

    It may be if it is not set, and timm does not define it. torchvision's transformers support only one size.
    """
    size = arguments_in_effect(settings.data)["image_size"]
    yield size
    layer = layers.layer_of("data.image_size")
    is_set = layer is not None and layer.is_typed
    is_free = takes(settings.data, "image_size") and not is_set
    if not is_free or size != _SIZES[0] or is_timm(settings.model.backbone):
        return
    for smaller in _SIZES[1:]:
        with suppress(ValueError):
            check_first_pass(model.image_classifier, settings.model.backbone, smaller)
            yield smaller
