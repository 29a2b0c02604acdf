"""What may change in a run that is resumed. Each setting says so in its row of the table (`About.resume`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.data.datamodule import ImageDataModule
from finetune.runs.resume import Start
from finetune.settings.configs import flattened, to_config
from finetune.settings.fields import find_setting
from finetune.settings.schema import FitSettings

Pair = tuple[Any, Any]  # the values of a setting in the run and in the command
Changes = Mapping[str, Pair]  # by full name

_OF_TEST = {"trainer.limit_test_batches", "trainer.precision"}


def changes_between(before: FitSettings, now: FitSettings) -> dict[str, Pair]:
    """Return the settings of a command that differ from those of a run and have an effect; see `changes_from`."""
    return changes_from(dict(flattened(FitSettings, to_config(before), {})), now)


def changes_from(old: Mapping[str, Any], now: FitSettings) -> dict[str, Pair]:
    """Return the settings of a command that differ from the values in a config.yaml and have an effect, by full name.

    Arguments that only one of two classes has are left out: the names of the classes differ already.

    Args:
        old: The values in config.yaml, by full name.
        now: The settings of the command.
    """
    new = dict(flattened(FitSettings, to_config(now), {}))
    common = [name for name in old if name in new and _kind_of(name) != "free"]
    return {name: (old[name], new[name]) for name in common if old[name] != new[name]}


def held_settings(changes: Changes) -> set[str]:
    """Return the names of the settings that keep the value of the run, since its checkpoint has them."""
    return {".".join(name.split(".")[:2]) for name in _of_kind(changes, "stays")}


def describe_held(changes: Changes) -> str:
    """Return in words which settings keep the value of the run; "" for none."""
    return "; ".join(
        f"{name} stays {json.dumps(before)}, not {json.dumps(now)}, since the checkpoint decides"
        for name, (before, now) in _of_kind(changes, "stays").items()
    )


def check_fixed(changes: Changes, members: int) -> None:
    """Check that no setting differs with which the state of optimizer or scheduler would not fit.

    Args:
        changes: The settings that differ.
        members: Number of networks of the run.

    Raises:
        ValueError: One does.
    """
    # an ensemble cannot give its weights to a new run
    hint = "may start from its weights: --model.weights LAST.CKPT" if members == 1 else "begins"
    if fixed := _of_kind(changes, "fixed"):
        raise ValueError(
            f"the run cannot continue with {_in_words(fixed)}; a new run {hint} without --resume"
        )


def check_changes(
    start: Start, data: ImageDataModule, changes: Changes, allow: bool, is_finished: bool
) -> str:
    """Return what has changed since a run began, in words; "" for nothing.

    Args:
        start: Its last checkpoint.
        data: The images of the command.
        changes: The settings that differ.
        allow: Whether training may see the images in another order.
        is_finished: Whether the run has nothing left to train, so that settings of data and model have no effect.

    Raises:
        ValueError: Something has changed that must not change.
    """
    names = start.content["hyper_parameters"]["class_names"]
    if names != data.class_names:
        raise ValueError(
            f"{Path(start.path).parents[1]} is of the classes {', '.join(names)}, and {data.root} has "
            f"{', '.join(data.class_names)}: begin a new run without --resume"
        )
    has_other_images = start.content["finetune"]["data_fingerprint"] != data.fingerprint
    return describe_changes(changes, has_other_images, allow, is_finished)


def describe_changes(
    changes: Changes, has_other_images: bool, allow: bool, is_finished: bool = False
) -> str:
    """Return changes in words; see `check_changes`.

    Raises:
        ValueError: A setting has changed that must not change.
    """
    of_images = _of_kind(changes, "images")
    order = _of_kind(changes, "order")
    if has_other_images:
        order |= of_images | _of_kind(changes, "place")
    _check_order(order, has_other_images, allow)
    changed = _of_kind(changes, "changes")
    if not has_other_images:
        changed |= of_images
    if is_finished:
        _check_not_trained_otherwise(changed)
        changed = {name: pair for name, pair in changed.items() if name in _OF_TEST}
    changed |= order
    words = f"changed: {_in_words(changed)}" if changed else ""
    return "; ".join(filter(None, [words, describe_held(changes)]))


def _check_order(order: Changes, has_other_images: bool, allow: bool) -> None:
    """Check that training sees the images in the order in which the run began, unless another one is allowed.

    Raises:
        ValueError: The order changes.
    """
    if allow or not (order or has_other_images):
        return
    what = "train or validate on other images, labels or groups: restore them"
    if order:
        what = f"train in another order with {_in_words(order)}: keep the old value"
    raise ValueError(
        f"the run would {what}, begin a new run without --resume, or continue with --allow_changes true"
    )


def _check_not_trained_otherwise(changed: Changes) -> None:
    """Check that the command of a finished run has the settings of data and model with which it was trained.

    Raises:
        ValueError: One differs.
    """
    trained = {name: pair for name, pair in changed.items() if name.startswith(("data.", "model."))}
    if trained:
        raise ValueError(
            f"the run is finished, and was not trained with {_in_words(trained)}: leave that as it was, or begin a new "
            "run without --resume"
        )


def _kind_of(name: str) -> str:
    """Return what `--resume` does with a setting of this full name; see `About.resume`."""
    if name in ("model.optimizer.class_path", "model.scheduler.class_path"):
        return "fixed"
    if name.startswith(("model.optimizer.", "model.scheduler.")):
        return "stays"
    setting = find_setting(FitSettings, name)
    return "changes" if setting is None else setting.about.resume  # an argument of an own class


def _of_kind(changes: Changes, kind: str) -> dict[str, Pair]:
    return {name: pair for name, pair in changes.items() if _kind_of(name) == kind}


def _in_words(changes: Changes) -> str:
    return ", ".join(
        f"{name} {json.dumps(now)} (was {json.dumps(before)})"
        for name, (before, now) in changes.items()
    )
