"""`--minutes M`: how long a fit trains, at which size and how many networks, such that it ends in time here."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import yaml
from pytorch_lightning.utilities.seed import isolate_rng

from finetune.commands.parser import last_value
from finetune.commands.short_words import both
from finetune.data.datamodule import ImageDataModule
from finetune.distributed.launch import is_launched
from finetune.distributed.signals import is_first_process
from finetune.models.timm_backbones import is_timm
from finetune.profiling.time_trial import Costs, starting, trial
from finetune.runs.folder import newest_with_checkpoint
from finetune.system.messages import WrongUsage
from finetune.system.progress import duration
from finetune.training.classifier import Classifier
from finetune.training.precision import automatic_precision
from finetune.training.run_length import fewest_epochs, usual_epochs
from finetune.training.time_budget import Plan, plan

Make = Callable[[], tuple[ImageDataModule, Classifier]]

_CHOICE = "FINETUNE_MINUTES"  # what was chosen, for the processes of the other devices
# What else can say how long to train, and what it is where it does not.
_LIMITS = {"max_steps": -1, "max_time": None, "fast_dev_run": False, "overfit_batches": 0.0}
_CHOSEN = ("max_epochs", "limit_train_batches")  # what a config says of these is overruled
_TRIED = 0.05  # share of the minutes in which steps are timed, and seconds at most
_LONGEST_TRIAL = 5.0
_MOST = 100  # epochs
# How often each of several networks sees a picture, at least, and as a share of what is usual: up to there a single one
# gains more by learning longer. In docs/benchmarks.md, "How long" and "Several networks".
_FEWEST_OF_SEVERAL, _USUAL_OF_SEVERAL = 15, 0.8
_MOST_MEMBERS = 5  # each answers for each picture, for good; what a further one adds is less than the one before
_ENDING = 2.5  # seconds for what is written in the end, the report most of all
_BETWEEN = 0.2  # seconds between epochs besides validation and checkpoint
_SIZES = (224, 192, 160, 128)  # the default, and smaller ones that pretrained networks still take well


def settle_minutes(config: Any, arguments: Sequence[str], began: float, make: Make) -> str:
    """Choose the length of a fit that is given minutes, and return in words what was chosen.

    What is chosen stands in the config as if it had been given, so that the run can be repeated: the minutes do not.

    Args:
        config: Of `fit`, as parsed; changed in place.
        arguments: The command line: a limit in it is not overruled, but refused.
        began: `time.monotonic` when the command began.
        make: Gives the pictures and a network as the config has them.

    Raises:
        WrongUsage: Another limit is given, by a config max_steps and the like (its epochs are overruled); the pictures'
            size is to change; or several machines are to work together.
        ValueError: The time does not suffice for a single step.
    """
    minutes, config.minutes = config.minutes, None
    if minutes is None:
        return ""
    _check(minutes, config, arguments)
    if chosen := _chosen_before(config, arguments):
        _put(config, chosen)
        return ""
    if config.trainer.precision is None:
        config.trainer.precision = automatic_precision(config.trainer.accelerator, None, goes_on=True)
    other_processes = starting(config.trainer, time.monotonic() - began, config.test_after_fit)
    aim = _Aim(60 * minutes, began, config.test_after_fit, other_processes)
    found = aim.tried(make, config.trainer)
    size = config.data.init_args.image_size
    if not found.is_enough() and _may_shrink(config, arguments):
        smaller = next((s for s in _SIZES[1:] if found.at(s / size).is_enough()), _SIZES[-1])
        config.data.init_args.image_size = size = smaller
        found = aim.tried(make, config.trainer)
    num = found.most_members() if _may_be_several(config, arguments) else 1
    if num > 1:
        config.model.members = num
        try:
            together = aim.tried(make, config.trainer)
        except torch.OutOfMemoryError:  # of a GPU
            together = None
        if together and together.plan:
            found = together
        else:
            config.model.members = 1
    if found.plan is None:
        raise ValueError(
            f"--minutes {minutes:g} is not enough for a single step: all else takes {found.others:.0f} s here, and a "
            f"step {found.costs.batch:.1f} s"
        )
    epochs, batches, _, seconds = found.plan
    chosen = {"max_epochs": epochs, "limit_train_batches": batches, "image_size": size}
    _put(config, {**chosen, "members": config.model.members})
    steps = epochs * math.ceil((batches or found.num_batches) / config.trainer.accumulate_grad_batches)
    part = f" of {batches} batches each" if batches else ""
    most = f"; more than {_MOST} epochs are not chosen" if epochs == _MOST else ""
    until_now = duration(time.monotonic() - began)
    length = f"{epochs} epochs{part}, {steps:,} steps, with pictures of {size} pixels"
    if config.model.members > 1:
        length += f", of {config.model.members} networks that answer together (--members 1 for one)"
    return f"{length}: about {duration(seconds)} here, after {until_now} until now{most}"


class _Length(NamedTuple):
    """How long a fit can be at one size; `others` are the seconds that are not training or validation."""

    costs: Costs
    plan: Plan | None
    num_images: int
    num_batches: int
    others: float
    again: Callable[[Costs], "_Length"]

    def is_enough(self) -> bool:
        """Return whether training sees half as many pictures as it does at least where nobody says how long."""
        return 2 * self.times_seen() >= fewest_epochs(self.num_images)

    def most_members(self) -> int:
        """Return how many networks can each be trained so long that one more epoch is worth less than one more."""
        enough = max(_FEWEST_OF_SEVERAL, _USUAL_OF_SEVERAL * usual_epochs(self.num_images))
        several = range(_MOST_MEMBERS, 1, -1)
        return next((num for num in several if self._times(num, "checkpoint").times_seen() >= enough), 1)

    def at(self, scale: float) -> "_Length":
        """Return what to expect at another size."""
        return self._times(scale**2)

    def times_seen(self) -> float:
        """Return how often each picture is trained on."""
        return self.plan.seen / self.num_images if self.plan else 0.0

    def _times(self, factor: float, *others: str) -> "_Length":
        """Return what to expect where steps, evaluation and others take so many times as long."""
        costs = {name: getattr(self.costs, name) * factor for name in ("batch", "evaluate", *others)}
        return self.again(self.costs._replace(**costs))


class _Aim(NamedTuple):
    """When a fit is to have ended.

    Attributes:
        seconds: After `began`.
        began: `time.monotonic` when the command began.
        is_tested: Whether that is with a test.
        starting: Seconds until the processes of the other devices are there.
    """

    seconds: float
    began: float
    is_tested: bool
    starting: float

    def tried(self, make: Make, trainer: Any) -> _Length:
        """Return how long a fit can be, from a trial."""
        with isolate_rng():  # the fit begins with random numbers of its own
            data, model = make()
            batch_size = data.batch_size
            costs = trial(model, data, trainer, min(_LONGEST_TRIAL, _TRIED * self.seconds))
        # It has evaluated what training sees: convolutions cost as much as there are pixels.
        costs = costs._replace(evaluate=costs.evaluate * (data.eval_image_size / data.image_size) ** 2)
        sizes = {str(split): len(data.splits[split].labels) for split in data.splits}
        return self._length(costs, sizes, batch_size)

    def _length(self, costs: Costs, sizes: Mapping[str, int], batch_size: int) -> _Length:
        num_tested = sizes.get("test", 0) if self.is_tested else 0
        others = self.starting + costs.start + num_tested * (costs.evaluate + costs.decode) + _ENDING
        others += time.monotonic() - self.began
        between = sizes.get("val", 0) * costs.evaluate + costs.checkpoint + _BETWEEN
        num = sizes["train"]
        found = plan(self.seconds - others, costs.batch, between, num, batch_size, _MOST)
        again = partial(self._length, sizes=sizes, batch_size=batch_size)
        return _Length(costs, found, num, math.ceil(num / batch_size), others, again)


def _check(minutes: float, config: Any, arguments: Sequence[str]) -> None:
    if not 0 < minutes < math.inf:
        raise WrongUsage(f"--minutes must be a number and more than 0, got {minutes}")
    given = [name for name, unset in _LIMITS.items() if config.trainer[name] != unset]
    given += [name for name in _CHOSEN if last_value(arguments, f"--trainer.{name}") is not None]
    if given:
        flag = both("fit", f"trainer.{given[0]}")
        raise WrongUsage(f"--minutes and {flag} both say how long to train: leave one out")
    if getattr(config.data.init_args, "image_size_schedule", None) is not None:
        raise WrongUsage("--minutes tries pictures of one size: leave out --data.image_size_schedule, or give --epochs")
    if config.trainer.num_nodes != 1 or is_launched():
        raise WrongUsage("--minutes measures on one machine: give --epochs (--trainer.max_epochs) to several")


def _chosen_before(config: Any, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return what this run's first process has chosen, or the run that this one goes on with."""
    if not is_first_process():
        if _CHOICE not in os.environ:
            raise WrongUsage("--minutes needs to start the other devices' processes itself: give --epochs to these")
        return json.loads(os.environ[_CHOICE])
    newest = newest_with_checkpoint(config.trainer.default_root_dir) if config.resume else None
    if newest is None or not (file := newest / "config.yaml").is_file():
        return None
    try:
        before = yaml.safe_load(file.read_text("utf-8"))
        chosen = {name: before["trainer"][name] for name in _CHOSEN}
        chosen["image_size"] = before["data"]["init_args"]["image_size"]
        chosen["members"] = (before.get("model") or {}).get("members", 1)
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is damaged: {reason}; give --epochs instead of --minutes to go on") from error
    # What is given all the same is for resuming to refuse or allow, as without --minutes.
    now = {"image_size": config.data.init_args.image_size, "members": config.model.members}
    return chosen | {name: value for name, value in now.items() if _is_given(arguments, name)}


def _put(config: Any, chosen: Mapping[str, Any]) -> None:
    os.environ[_CHOICE] = json.dumps(chosen)
    config.trainer.max_epochs = chosen["max_epochs"]
    config.trainer.limit_train_batches = chosen["limit_train_batches"]
    config.data.init_args.image_size = chosen["image_size"]
    config.model.members = chosen["members"]


def _may_be_several(config: Any, arguments: Sequence[str]) -> bool:
    """Return whether nobody has said how many networks, and several would not be one: that differ by their heads."""
    model, is_said = config.model, _is_given(arguments, "members") or config.ckpt_path is not None
    has_views = getattr(config.data.init_args, "num_views", None) is not None  # of which features are kept
    is_split = any(name in str(config.trainer.strategy) for name in ("model_parallel", "MeshStrategy"))
    return (
        model.members == 1
        and model.head_init == "xavier"
        and model.freeze is None
        and not (is_said or has_views or is_split)
    )


def _may_shrink(config: Any, arguments: Sequence[str]) -> bool:
    """Return whether nobody has said a size; networks of timm's have their own."""
    return (
        not _is_given(arguments, "image_size")
        and config.data.init_args.image_size == _SIZES[0]
        and not is_timm(config.model.backbone)
    )


def _is_given(arguments: Sequence[str], name: str) -> bool:
    """Return whether the command line itself has a value of a setting of `data` or `model`."""
    return any(last_value(arguments, f"--{group}.{name}") is not None for group in ("data", "data.init_args", "model"))
