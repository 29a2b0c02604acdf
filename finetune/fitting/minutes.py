"""`--minutes M`: choose epochs and image size of a fit, so that it ends in time."""

import math
import time
from contextlib import suppress
from typing import Any

from finetune.data.datamodule import ImageDataModule
from finetune.fitting.build import arguments_in_effect, build_model, open_data, takes
from finetune.fitting.plan import Plan
from finetune.models.size_check import check_first_pass
from finetune.models.timm_backbones import is_timm
from finetune.profiling.fit_length import MOST_EPOCHS, Deadline, Length
from finetune.settings.layers import Layers
from finetune.settings.schema import FitSettings
from finetune.system.progress import duration
from finetune.training.classifier import Classifier

# the default, and smaller sizes at which pretrained networks are still accurate
_SIZES = (224, 192, 160, 128)


def settle_minutes(plan: Plan, layers: Layers, began: float) -> Plan:
    """Return the plan of a new fit with the length that ends in time, in place of the minutes.

    Folds share the time equally. All of them have the length that is measured on the first.

    Args:
        plan: Its settings have `minutes`.
        layers: Who has set what.
        began: `time.monotonic` when the command began.

    Raises:
        ValueError: The time is not enough for a single step.
    """
    settings = plan.settings
    assert settings.minutes is not None, "only of a fit with minutes"

    def make() -> tuple[ImageDataModule, Classifier]:
        data = open_data(settings.data)
        model = build_model(settings.model, data)
        if settings.threshold is not None:
            model.task.parse_aim(
                settings.threshold
            )  # so that an error comes before a step is timed
        return data, model

    seconds = 60 * settings.minutes / (settings.folds or 1)
    alone = plan.ranking["seconds"] if plan.ranking else 0.0  # only rank 0 ranks networks
    deadline = Deadline(seconds, began, settings, alone)
    length = deadline.measure_length(make)
    size = arguments_in_effect(settings.data)["image_size"]
    if not length.is_enough() and _may_shrink(settings, layers, size):
        sizes = _smaller_sizes(make()[1], settings.model.backbone)
        for smaller in sizes:
            scaled = length.at_scale(smaller / size)
            if scaled.is_enough():
                break
        if sizes:
            length, size = scaled, smaller
    if length.training is None:
        raise ValueError(
            f"--minutes {settings.minutes:g} is not enough for a single step: the rest takes {length.others:.0f} s on "
            f"this machine, and a step {length.costs.batch:.1f} s; allow more minutes, or use a smaller --size "
            "(--data.image_size) or --batch (--data.batch_size)"
        )
    values: dict[str, Any] = {
        "minutes": None,
        "trainer.max_epochs": length.training.epochs,
        "trainer.limit_train_batches": length.training.batches,
        "trainer.precision": deadline.precision,
    }
    if takes(settings.data, "image_size"):
        values["data.image_size"] = size
    limit = arguments_in_effect(settings.data)["cache_limit_gb"]
    has_cache = length.cache_limit_gb > 0 or not limit or not takes(settings.data, "cache_limit_gb")
    if not has_cache:
        values["data.cache_limit_gb"] = 0.0
    return plan.put(values, _note(length, size, has_cache, settings, began))


def _note(length: Length, size: int, has_cache: bool, settings: FitSettings, began: float) -> str:
    """Return the note about the choice."""
    training = length.training
    assert training is not None, "there is time for a step"
    part = f" of {training.batches} batches each" if training.batches else ""
    batches = training.batches or length.num_batches
    steps = training.epochs * math.ceil(batches / settings.trainer.accumulate_grad_batches)
    text = f"{training.epochs} epochs{part}, {steps:,} steps, with images of {size} pixels"
    if not has_cache:
        text += " decoded as they come, since there is no time to see all of them twice"
    took = duration(time.monotonic() - began)
    text += f": about {duration(training.seconds)} on this machine, after {took} so far"
    if training.epochs == MOST_EPOCHS:
        text += f"; more than {MOST_EPOCHS} epochs are not chosen"
    return text


def _may_shrink(settings: FitSettings, layers: Layers, size: int) -> bool:
    """Return whether the image size may be reduced: it is not set, and timm does not define it."""
    layer = layers.layer_of("data.image_size")
    is_set = layer is not None and layer.kind == "flag"
    is_free = takes(settings.data, "image_size") and not is_set
    return is_free and size == _SIZES[0] and not is_timm(settings.model.backbone)


def _smaller_sizes(model: Classifier, backbone: str) -> list[int]:
    """Return the smaller image sizes that the network supports: torchvision's transformers support only one size."""
    supported = []
    for size in _SIZES[1:]:
        with suppress(ValueError):
            check_first_pass(model.image_classifier, backbone, size)
            supported.append(size)
    return supported
