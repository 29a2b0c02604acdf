"""`--minutes M`: choose epochs and image size of a fit, so that it ends in time."""

import logging
import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from finetune.commands.explicit_settings import ExplicitSettings
from finetune.commands.options import flag_names
from finetune.commands.trainer import check_allowed
from finetune.distributed.launch import is_launched
from finetune.distributed.signals import is_rank_zero
from finetune.models.size_check import check_first_pass
from finetune.models.timm_backbones import is_timm
from finetune.profiling.fit_length import MOST_EPOCHS, Deadline, Length, Make
from finetune.system.messages import WrongUsage
from finetune.system.progress import duration

log = logging.getLogger(__name__)

_NO_LIMIT = -1  # of steps: Lightning's default
_CHOSEN = ("max_epochs", "limit_train_batches")  # values of a config are overruled
# the default, and smaller sizes at which pretrained networks are still accurate
_SIZES = (224, 192, 160, 128)


@dataclass(frozen=True)
class ChosenLength:
    """The length of a fit with `--minutes`, and the settings that were chosen with it.

    Attributes:
        max_epochs: Epochs.
        limit_train_batches: Batches of each epoch; None for all.
        image_size: Side of the training images in pixels.
        has_cache: Whether decoded images are cached.
        precision: The precision in which steps were timed; None if none were.
    """

    max_epochs: int
    limit_train_batches: int | None
    image_size: int
    has_cache: bool
    precision: str | None = None

    def put(self, config: Any) -> None:
        """Write the choice into the options of `fit`, like explicit settings."""
        config.trainer.max_epochs = self.max_epochs
        config.trainer.limit_train_batches = self.limit_train_batches
        config.data.init_args.image_size = self.image_size
        if not self.has_cache:
            config.data.init_args.cache_limit_gb = 0.0

    def flags(self, resume: str | bool) -> list[str]:
        """Return the flags with which another process makes the same choice, without `--minutes`.

        Args:
            resume: The run that continues; False for a new one.
        """
        values: dict[str, Any] = {
            "minutes": None,
            "trainer.max_epochs": self.max_epochs,
            "trainer.limit_train_batches": self.limit_train_batches,
            "data.image_size": self.image_size,
        }
        if not self.has_cache:
            values["data.cache_limit_gb"] = 0.0
        if self.precision is not None:
            values["trainer.precision"] = self.precision
        flags = [f"--{name}={'null' if value is None else value}" for name, value in values.items()]
        return [*flags, f"--resume={resume}"]


def settle_minutes(
    config: Any, explicit: ExplicitSettings, began: float, make: Make, rank_0_seconds: float = 0.0
) -> str:
    """Choose the length of a fit with `--minutes`, and return a message about the choice.

    The choice is written to the config like explicit settings, and the minutes are removed, so that the run can be
    repeated.

    Args:
        config: The options of `fit`, as parsed; changed in place.
        explicit: The settings of the command line: a limit that a flag gives is refused, not overruled.
        began: `time.monotonic` when the command started.
        make: Makes a data module and a network with the current settings.
        rank_0_seconds: Seconds since `began` that only rank 0 has spent.

    Raises:
        WrongUsage: There is another limit (epochs of a config are overruled, but not its max_steps, for example). The
            image size changes during training. Validation is not a share of an epoch. The fit starts from a
            checkpoint. Or it uses several machines.
        ValueError: The time is not enough for a single step.
    """
    minutes = config.minutes
    config.minutes = None
    if minutes is None:
        return ""
    check_minutes(minutes, config, explicit)
    check_allowed(config.trainer)
    if not is_rank_zero():
        raise WrongUsage(
            "--minutes must start the processes of the other devices itself: pass --epochs instead"
        )
    choice = _length_of_resumed_run(config, explicit)
    message = ""
    if choice is None:
        deadline = Deadline(60 * minutes, began, config, rank_0_seconds)
        length = _measure(deadline, make, config, explicit)
        choice = _chosen_length(minutes, length, config)
        message = _message(length, choice, config, began)
    choice.put(config)
    # Lightning starts the processes of the other devices with these arguments.
    sys.argv = [*sys.argv, *choice.flags(config.resume)]
    return message


def _measure(deadline: Deadline, make: Make, config: Any, explicit: ExplicitSettings) -> Length:
    """Return how long the fit can be, and set the image size in the config."""
    length = deadline.measure_length(make)
    data = config.data.init_args
    if not length.is_enough() and _may_shrink(config, explicit) and (sizes := _smaller_sizes(make)):
        full_size = data.image_size
        for data.image_size in sizes:
            smaller = length.at_scale(data.image_size / full_size)
            if smaller.is_enough():
                break
        return smaller
    return length


def _chosen_length(minutes: float, length: Length, config: Any) -> ChosenLength:
    """Return the settings for a measured length.

    Raises:
        ValueError: The time is not enough for a step.
    """
    if length.training is None:
        smaller_ones = " or ".join(
            flag_names("fit", f"data.{name}") for name in ("image_size", "batch_size")
        )
        raise ValueError(
            f"--minutes {minutes:g} is not enough for a single step: the rest takes {length.others:.0f} s on this "
            f"machine, and a step {length.costs.batch:.1f} s; allow more minutes, or use a smaller {smaller_ones}"
        )
    epochs = length.training.epochs
    data = config.data.init_args
    return ChosenLength(
        max_epochs=epochs,
        limit_train_batches=length.training.batches,
        image_size=data.image_size,
        has_cache=length.cache_limit_gb > 0 or not getattr(data, "cache_limit_gb", 0),
        precision=config.trainer.precision,
    )


def _steps(length: Length, config: Any) -> int:
    """Return the number of optimizer steps of a fit of this length."""
    assert length.training is not None
    batches = length.training.batches or length.num_batches
    return length.training.epochs * math.ceil(batches / config.trainer.accumulate_grad_batches)


def _message(length: Length, choice: ChosenLength, config: Any, began: float) -> str:
    """Return the message about the choice."""
    assert length.training is not None
    part = f" of {choice.limit_train_batches} batches each" if choice.limit_train_batches else ""
    text = (
        f"{choice.max_epochs} epochs{part}, {_steps(length, config):,} steps, with images of "
        f"{choice.image_size} pixels"
    )
    if not choice.has_cache:
        text += " decoded as they come, since there is no time to see all of them twice"
    took = duration(time.monotonic() - began)
    text += f": about {duration(length.training.seconds)} on this machine, after {took} so far"
    if choice.max_epochs == MOST_EPOCHS:
        text += f"; more than {MOST_EPOCHS} epochs are not chosen"
    return text


def check_minutes(minutes: float, config: Any, explicit: ExplicitSettings) -> None:
    """Make sure that a fit can have `--minutes`.

    Raises:
        WrongUsage: See `settle_minutes`.
    """
    if not 0 < minutes < math.inf:
        raise WrongUsage(f"--minutes must be a number and more than 0, got {minutes}")
    limits = [name for name in ("max_steps", *_CHOSEN) if explicit.has_flag(f"trainer.{name}")]
    # the config of a resumed run has its own limit, which is allowed
    if not config.resume and config.trainer.max_steps != _NO_LIMIT:
        limits.insert(0, "max_steps")
    if limits:
        flag = flag_names("fit", f"trainer.{limits[0]}")
        raise WrongUsage(f"--minutes and {flag} both set the length of training: remove one")
    if config.trainer.num_nodes != 1 or is_launched():
        raise WrongUsage(
            "--minutes measures on one machine: on several, pass --epochs (--trainer.max_epochs) instead"
        )
    if config.ckpt_path is not None:
        raise WrongUsage(
            "--minutes chooses the length of a fit from its first step: to continue from --ckpt_path pass --epochs, to "
            "start from its weights pass it as --weights"
        )
    interval = config.trainer.val_check_interval
    if interval is not None and not (isinstance(interval, float) and 0 < interval <= 1):
        raise WrongUsage(
            "--minutes chooses how many batches an epoch has: set trainer.val_check_interval as a share of it, such "
            f"as 0.5, not {interval}"
        )


def _length_of_resumed_run(config: Any, explicit: ExplicitSettings) -> ChosenLength | None:
    """Return the choice that the resumed run began with; None for a new run."""
    if not config.resume or not (file := Path(config.resume, "config.yaml")).is_file():
        return None
    try:
        before = yaml.safe_load(file.read_text("utf-8"))
        data = before["data"]["init_args"]
        choice = ChosenLength(
            max_epochs=before["trainer"]["max_epochs"],
            limit_train_batches=before["trainer"]["limit_train_batches"],
            image_size=data["image_size"],
            has_cache=data.get("cache_limit_gb") != 0,
        )
        max_steps = before["trainer"].get("max_steps", _NO_LIMIT)
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{file} is damaged: {reason}; pass --epochs instead of --minutes to continue"
        ) from error
    if max_steps != _NO_LIMIT:
        raise WrongUsage(
            f"{config.resume} ends by trainer.max_steps {max_steps}: pass that instead of --minutes to continue"
        )
    log.info(
        "--minutes is for new runs: %s continues to its %s epochs",
        config.resume,
        choice.max_epochs,
    )
    # Explicit settings stay: resuming refuses or allows them, as without --minutes.
    if explicit.has_flag("data.image_size"):
        choice = replace(choice, image_size=config.data.init_args.image_size)
    return choice


def _may_shrink(config: Any, explicit: ExplicitSettings) -> bool:
    """Return whether the image size may be reduced: it is not set, and timm does not define it."""
    return (
        not explicit.has_flag("data.image_size")
        and config.data.init_args.image_size == _SIZES[0]
        and not is_timm(config.model.backbone)
    )


def _smaller_sizes(make: Make) -> list[int]:
    """Return the smaller image sizes that the network supports: torchvision's transformers support only one size."""
    _, model = make()
    supported = []
    for size in _SIZES[1:]:
        with suppress(ValueError):
            check_first_pass(model.image_classifier, model.backbone, size)
            supported.append(size)
    return supported
