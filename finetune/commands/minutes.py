"""`--minutes M`: how long a fit trains, at which size and, of random heads, how many networks, to end in time here."""

import logging
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from finetune.commands.explicit_settings import ExplicitSettings
from finetune.commands.options import flag_names
from finetune.commands.trainer import check_allowed
from finetune.distributed.launch import is_launched
from finetune.distributed.signals import is_rank_zero
from finetune.models.heads import resolved_head_init
from finetune.models.size_check import check_first_pass
from finetune.models.timm_backbones import is_timm
from finetune.profiling.fit_length import MOST_EPOCHS, Aim, Length, Make
from finetune.profiling.precision_trial import fit_precision
from finetune.system.messages import WrongUsage
from finetune.system.progress import duration
from finetune.training.precision import automatic_precision

log = logging.getLogger(__name__)

# What else can say how long to train, and what it is where it does not.
_LIMITS = {"max_steps": -1, "max_time": None, "fast_dev_run": False, "overfit_batches": 0.0}
_CHOSEN = ("max_epochs", "limit_train_batches")  # what a config says of these is overruled
# share of what several networks are to see that is enough once a trial of them has taken time, too
_NEARLY = 0.9
# the default, and smaller ones that pretrained networks still take well
_SIZES = (224, 192, 160, 128)


@dataclass(frozen=True)
class Choice:
    """The length of a fit, and what goes with it.

    Attributes:
        max_epochs: Epochs.
        limit_train_batches: Batches of each epoch; None for all.
        image_size: Side of the training images in pixels.
        members: Networks that answer together.
        has_cache: Whether decoded images are cached.
        precision: In which the steps were timed; None if none were.
    """

    max_epochs: int
    limit_train_batches: int | None
    image_size: int
    members: int
    has_cache: bool
    precision: str | None = None

    def put(self, config: Any) -> None:
        """Write it into the options of `fit`, as if it had been given."""
        config.trainer.max_epochs = self.max_epochs
        config.trainer.limit_train_batches = self.limit_train_batches
        config.data.init_args.image_size = self.image_size
        config.model.members = self.members
        if not self.has_cache:
            config.data.init_args.cache_limit_gb = 0.0

    def flags(self, resume: str | bool) -> list[str]:
        """Return the flags that give another process the same, in place of `--minutes`.

        Args:
            resume: The run that continues; False for a new one.
        """
        values: dict[str, Any] = {
            "minutes": None,
            "trainer.max_epochs": self.max_epochs,
            "trainer.limit_train_batches": self.limit_train_batches,
            "data.image_size": self.image_size,
            "model.members": self.members,
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
    """Choose the length of a fit that is given minutes, and return in words what was chosen.

    What is chosen stands in the config as if it had been given, so that the run can be repeated: the minutes do not.

    Args:
        config: Of `fit`, as parsed; changed in place.
        explicit: The settings that flags give: a limit among them is not overruled, but refused.
        began: `time.monotonic` when the command began.
        make: Gives the pictures and a network as the config has them.
        rank_0_seconds: Seconds since `began` that the processes of other devices do not spend, too.

    Raises:
        WrongUsage: Another limit is given, by a config max_steps and the like (its epochs are overruled), or more steps
            at least than there is time for; the pictures' size is to change; validation does not come by the epoch; the
            fit goes on from a checkpoint; or several machines are to work together.
        ValueError: The time does not suffice for a single step.
    """
    minutes, config.minutes = config.minutes, None
    if minutes is None:
        return ""
    check_minutes(minutes, config, explicit)
    check_allowed(config.trainer)
    if not is_rank_zero():
        raise WrongUsage(
            "--minutes needs to start the other devices' processes itself: give --epochs to these"
        )
    choice = _choice_of_resumed_run(config, explicit)
    message = ""
    if choice is None:
        aim = Aim(60 * minutes, began, config, rank_0_seconds)
        length = _measure(aim, make, config, explicit)
        choice = _choice(minutes, length, config)
        message = _message(length, choice, config, began)
    choice.put(config)
    # Lightning starts the processes of the other devices with these arguments.
    sys.argv = [*sys.argv, *choice.flags(config.resume)]
    return message


def _measure(aim: Aim, make: Make, config: Any, explicit: ExplicitSettings) -> Length:
    """Return how long a fit can be; set the size and the number of networks that suit it in the config."""
    if config.trainer.precision is None:

        def faster_on_cpu() -> str:
            data, model = make()
            return fit_precision(model, data, config.trainer)

        config.trainer.precision = automatic_precision(
            config.trainer.accelerator, None, is_resumed=True, faster_on_cpu=faster_on_cpu
        )
    length = aim.tried(make)
    data = config.data.init_args
    if not length.is_enough() and _may_shrink(config, explicit) and (sizes := _smaller(make)):
        enough = (size for size in sizes if length.at(size / data.image_size).is_enough())
        data.image_size = next(enough, sizes[-1])
        length = aim.tried(make)
    if _may_use_several_members(config, explicit):
        config.model.members, length = _choose_members(aim, make, length, config)
    return length


def _choice(minutes: float, length: Length, config: Any) -> Choice:
    """Return what is chosen.

    Raises:
        ValueError: There is no time for a step.
        WrongUsage: The config asks for more epochs or steps than there is time for.
    """
    if length.plan is None:
        smaller_ones = " or ".join(
            flag_names("fit", f"data.{name}") for name in ("image_size", "batch_size")
        )
        raise ValueError(
            f"--minutes {minutes:g} is not enough for a single step: all else takes {length.others:.0f} s here, and a "
            f"step {length.costs.batch:.1f} s; give more of them, or a smaller {smaller_ones}"
        )
    epochs = length.plan.epochs
    _check_least(
        minutes, config.trainer, {"min_epochs": epochs, "min_steps": _steps(length, config)}
    )
    data = config.data.init_args
    return Choice(
        max_epochs=epochs,
        limit_train_batches=length.plan.batches,
        image_size=data.image_size,
        members=config.model.members,
        has_cache=length.cache_limit_gb > 0 or not getattr(data, "cache_limit_gb", 0),
        precision=config.trainer.precision,
    )


def _steps(length: Length, config: Any) -> int:
    assert length.plan is not None
    batches = length.plan.batches or length.num_batches
    return length.plan.epochs * math.ceil(batches / config.trainer.accumulate_grad_batches)


def _message(length: Length, choice: Choice, config: Any, began: float) -> str:
    """Return in words what was chosen."""
    assert length.plan is not None
    part = f" of {choice.limit_train_batches} batches each" if choice.limit_train_batches else ""
    text = (
        f"{choice.max_epochs} epochs{part}, {_steps(length, config):,} steps, with pictures of "
        f"{choice.image_size} pixels"
    )
    if not choice.has_cache:
        text += " decoded as they come, since there is no time to see all of them twice"
    if choice.members > 1:
        text += f", of {choice.members} networks that answer together (--members 1 for one)"
    took = duration(time.monotonic() - began)
    text += f": about {duration(length.plan.seconds)} here, after {took} until now"
    if choice.max_epochs == MOST_EPOCHS:
        text += f"; more than {MOST_EPOCHS} epochs are not chosen"
    return text


def _choose_members(aim: Aim, make: Make, single: Length, config: Any) -> tuple[int, Length]:
    """Return how many networks there are to be, and how long they can learn, where one can as long as `single`."""
    num, _ = single.of_members()
    if num == 1:
        return 1, single
    config.model.members = num
    try:
        several = aim.tried(make)
    except (RuntimeError, MemoryError) as error:
        if not _is_of_memory(error):
            raise
    else:
        # they take longer than so many times one
        fewer, length = several.of_members(num, tried=num, patience=_NEARLY)
        return (fewer, length) if fewer > 1 else (1, single.now())
    # of what the error held until here: processes of their own may train on this GPU
    torch.cuda.empty_cache()
    return 1, single.now()


def _is_of_memory(error: Exception) -> bool:
    """Return whether a device had too little memory; cuDNN and the CPU say so in words alone."""
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        word in str(error) for word in words
    )


def check_minutes(minutes: float, config: Any, explicit: ExplicitSettings) -> None:
    """Make sure that a fit can be given minutes.

    Raises:
        WrongUsage: See `settle_minutes`.
    """
    if not 0 < minutes < math.inf:
        raise WrongUsage(f"--minutes must be a number and more than 0, got {minutes}")
    if config.resume:  # the limits of the run that goes on are no others
        limits = [name for name in _LIMITS if explicit.has_flag(f"trainer.{name}")]
    else:
        limits = [name for name, unset in _LIMITS.items() if config.trainer[name] != unset]
    limits += [name for name in _CHOSEN if explicit.has_flag(f"trainer.{name}")]
    if limits:
        flag = flag_names("fit", f"trainer.{limits[0]}")
        raise WrongUsage(f"--minutes and {flag} both say how long to train: leave one out")
    if getattr(config.data.init_args, "image_size_schedule", None) is not None:
        raise WrongUsage(
            "--minutes tries pictures of one size: leave out --data.image_size_schedule, or give --epochs"
        )
    if config.trainer.num_nodes != 1 or is_launched():
        raise WrongUsage(
            "--minutes measures on one machine: give --epochs (--trainer.max_epochs) to several"
        )
    if config.ckpt_path is not None:
        raise WrongUsage(
            "--minutes chooses the length of a fit from its first step: to go on from --ckpt_path give --epochs, to "
            "begin with its weights give it as --weights"
        )
    if config.trainer.plugins:
        raise WrongUsage(
            "--minutes tries steps without trainer.plugins: leave them out, or give --epochs"
        )
    interval = config.trainer.val_check_interval
    if interval is not None and not (isinstance(interval, float) and 0 < interval <= 1):
        raise WrongUsage(
            "--minutes chooses how many batches an epoch has: give trainer.val_check_interval as a share of it, such "
            f"as 0.5, not {interval}"
        )


def _check_least(minutes: float, trainer: Any, chosen: Mapping[str, int]) -> None:
    for name, num in chosen.items():
        if (least := trainer[name]) is not None and least > num:
            what = name.removeprefix("min_")
            raise WrongUsage(
                f"--minutes {minutes:g} is enough for {num:,} {what} here, and trainer.{name} is {least}: leave one out"
            )


def _choice_of_resumed_run(config: Any, explicit: ExplicitSettings) -> Choice | None:
    """Return what the run that continues was begun with; None for a new run."""
    if not config.resume or not (file := Path(config.resume, "config.yaml")).is_file():
        return None
    try:
        before = yaml.safe_load(file.read_text("utf-8"))
        data = before["data"]["init_args"]
        choice = Choice(
            max_epochs=before["trainer"]["max_epochs"],
            limit_train_batches=before["trainer"]["limit_train_batches"],
            image_size=data["image_size"],
            members=(before.get("model") or {}).get("members", 1),
            has_cache=data.get("cache_limit_gb") != 0,
        )
        other = {name: before["trainer"].get(name, unset) for name, unset in _LIMITS.items()}
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{file} is damaged: {reason}; give --epochs instead of --minutes to go on"
        ) from error
    if limits := [
        f"{name} {other[name]}" for name, unset in _LIMITS.items() if other[name] != unset
    ]:
        raise WrongUsage(
            f"{config.resume} ends by trainer.{limits[0]}: give that instead of --minutes to go on"
        )
    log.info(
        "--minutes is for new runs: %s goes on to its %s epochs",
        config.resume,
        choice.max_epochs,
    )
    # What the command line gives all the same is for resuming to refuse or allow, as without --minutes.
    if explicit.has_flag("data.image_size"):
        choice = replace(choice, image_size=config.data.init_args.image_size)
    if explicit.has_flag("model.members"):
        choice = replace(choice, members=config.model.members)
    return choice


def _may_use_several_members(config: Any, explicit: ExplicitSettings) -> bool:
    """Return whether several networks are worth a try: nobody chose their number, and they would differ by their heads.

    From pretrained weights one network starts from a fitted head, which several could not: theirs are random.
    """
    model = config.model
    if explicit.has_flag("model.members") or model.members != 1 or model.freeze is not None:
        return False
    return resolved_head_init(model.head_init, model.weights, model.members) == "xavier"


def _may_shrink(config: Any, explicit: ExplicitSettings) -> bool:
    """Return whether nobody has said a size; networks of timm's have their own."""
    return (
        not explicit.has_flag("data.image_size")
        and config.data.init_args.image_size == _SIZES[0]
        and not is_timm(config.model.backbone)
    )


def _smaller(make: Make) -> list[int]:
    """Return the smaller sizes that the network takes: a transformer of torchvision's has but one."""
    _, model = make()
    taken = []
    for size in _SIZES[1:]:
        with suppress(ValueError):
            check_first_pass(model.image_classifier, model.backbone, size)
            taken.append(size)
    return taken
