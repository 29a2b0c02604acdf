"""`--minutes M`: choose epochs and image size of a fit, so that it ends in time."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pytorch_lightning.utilities.seed import isolate_rng

from finetune.data.batch_limits import num_within
from finetune.data.datamodule import ImageDataModule, open_data
from finetune.fitting.build import arguments_in_effect, build_model, takes
from finetune.fitting.plan import Plan
from finetune.models.image_classifier import check_first_pass
from finetune.models.network_names import is_timm
from finetune.profiling.time_budget import (
    MOST_EPOCHS,
    Choice,
    TrainingLength,
    Work,
    choose,
    measure,
    num_devices_of,
)
from finetune.settings.layers import Layers, replaced
from finetune.settings.schema import FitSettings
from finetune.system.progress import duration
from finetune.training.classifier import Classifier
from finetune.training.precision import automatic_precision

# the default, and smaller sizes at which pretrained networks are still accurate
_SIZES = (224, 192, 160, 128)


def settle_minutes(plan: Plan, layers: Layers, began: float) -> Plan:
    """Return the plan of a new fit with the length that ends in time, in place of the minutes.

    Folds or members share the time equally. All of them have the length that is measured on the first.

    Args:
        plan: Its settings have `minutes`.
        layers: Who has set what.
        began: `time.monotonic` when the command began.

    Raises:
        ValueError: The time is not enough for a single step.
    """
    settings = plan.settings
    assert settings.minutes is not None, "only of a fit with minutes"
    seconds = 60 * settings.minutes / settings.num_fits
    # The processes of other devices take as long to start as this one, which alone ranks networks.
    start = time.monotonic() - began - (plan.ranking["seconds"] if plan.ranking else 0.0)
    end = began + seconds - (start if num_devices_of(settings.trainer) > 1 else 0.0)
    with isolate_rng():  # the measurement must not change the random numbers of the fit
        data = open_data(settings.data)
        model = build_model(settings.model, data)
        if settings.threshold is not None:
            model.task.parse_aim(settings.threshold)  # so that an error comes before the work
        precision = settings.trainer.precision or automatic_precision(
            settings.trainer.accelerator, None, is_resumed=False, network=model.network
        )
        work = _work(settings, data)
        trainer = replaced(settings.trainer, {"precision": precision})
        costs = measure(model, data, trainer, seconds, end - time.monotonic())
    choice = choose(costs, end - time.monotonic(), work, _sizes(settings, layers, model))
    if choice.training is None:
        raise ValueError(
            f"--minutes {settings.minutes:g} is not enough for a single step: the rest takes {choice.others:.0f} s on "
            f"this machine, and a step {choice.batch:.1f} s; allow more minutes, or use a smaller --size "
            "(--data.image_size) or --batch (--data.batch_size)"
        )
    values: dict[str, Any] = {
        "minutes": None,
        "trainer.max_epochs": choice.training.epochs,
        "trainer.limit_train_batches": choice.training.batches,
        "trainer.precision": precision,
    }
    if takes(settings.data, "image_size"):
        values["data.image_size"] = choice.size
    if takes(settings.data, "cache_limit_gb") and data.cache_limit_gb == 0:
        values["data.cache_limit_gb"] = 0.0
    return plan.put(values, _note(choice, choice.training, work, settings, began))


def _work(settings: FitSettings, data: ImageDataModule) -> Work:
    """Return how many images a fit trains on, validates in an epoch, and tests."""
    trainer = settings.trainer
    batch_size = data.batch_size
    num = {split: len(samples) for split, samples in data.splits.items()}
    validated = num_within(trainer.limit_val_batches, num.get("val", 0), batch_size)
    share = trainer.val_check_interval  # of an epoch; `check_minutes` refuses a number of batches
    validations = (1 if share is None else 1 // share) / (trainer.check_val_every_n_epoch or 1)
    tested = num_within(trainer.limit_test_batches, num.get("test", 0), batch_size)
    return Work(
        train=num.get("train", 0),
        batch_size=batch_size,
        validated=validations * validated,
        tested=tested if settings.test_after_fit else 0,
    )


def _note(
    choice: Choice, training: TrainingLength, work: Work, settings: FitSettings, began: float
) -> str:
    """Return the note about the choice."""
    part = f" of {training.batches} batches each" if training.batches else ""
    batches = training.batches or math.ceil(work.train / work.batch_size)
    steps = training.epochs * math.ceil(batches / settings.trainer.accumulate_grad_batches)
    text = f"{training.epochs} epochs{part}, {steps:,} steps, with images of {choice.size} pixels"
    took = duration(time.monotonic() - began)
    text += f": about {duration(training.seconds)} on this machine, after {took} so far"
    if training.epochs == MOST_EPOCHS:
        text += f"; more than {MOST_EPOCHS} epochs are not chosen"
    return text


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
