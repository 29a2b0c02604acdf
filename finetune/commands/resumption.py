"""`--resume`: which run a fit goes on with, decided once, and that run's settings below what the command says."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace
from pytorch_lightning.callbacks import Callback, Timer

from finetune.commands.parser import OneLineErrorParser
from finetune.commands.trainer import DEFAULTS, patience
from finetune.data.datamodule import ImageDataModule
from finetune.distributed.launch import starts_processes
from finetune.runs.changes import compared
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import config_text, last_checkpoint
from finetune.runs.lightning_callbacks import ended_by
from finetune.runs.newest_run import Found, Wanted, find_run, not_found, passed_over, settings_of
from finetune.runs.resume import Changes, is_of_data
from finetune.system.messages import NotFound, WrongUsage

_ANY_DATA = "finetune.ImageFolderData"  # the default, which goes on with a run of any class on its folder


class Plan(NamedTuple):
    """What a fit goes on with.

    Attributes:
        arguments: The command line, after the settings of the run to go on with.
        run: That run's folder; None for a new run.
        settings: What its config.yaml says.
        message: Why a new run begins, or which newer runs were passed over; "" for nothing to say.
    """

    arguments: list[str]
    run: Path | None = None
    settings: Mapping[str, Any] = {}
    message: str = ""


def plan_fit(parser: ArgumentParser, arguments: Sequence[str]) -> Plan:
    """Return what a fit goes on with.

    Args:
        parser: The command's; it reads what is said, without defaults.
        arguments: The command line in full.

    Raises:
        ValueError: The run that is named is of other data or another network, or there is nothing to go on with and no
            data to begin with.
    """
    new = Plan(list(arguments))
    if not any(re.match(r"--(resume|config)(=|$)", argument) for argument in arguments):
        return new
    # The parser demands data, which the run may have.
    said = parser.parse_args([arguments[0], "--data", _ANY_DATA, *arguments[1:]], defaults=False)[arguments[0]]
    if not said.get("resume") or said.get("trainer.fast_dev_run"):
        return new
    root = Path(str(said.get("trainer.default_root_dir") or DEFAULTS["default_root_dir"]))
    found = _named(Path(said.resume), said) if isinstance(said.resume, str) else find_run(root, _wanted(said))
    if found.run is None:
        if said.get("data.class_path") == _ANY_DATA and said.get("data.init_args.root") is None:
            raise NotFound(f"--resume found no run beneath {root}, and there is no data: finetune fit FOLDER --resume")
        return new._replace(message=not_found(root, found.passed))
    settings = _beneath(found, arguments)
    plan = Plan([arguments[0], "--config", yaml.safe_dump(settings), *arguments[1:]], found.run, found.settings)
    if found.begun and (limit := _limit_reached(found.run, parser.parse_args(plan.arguments)[arguments[0]])):
        # That later one is meant, not the one finished before it.
        ended = f"{found.begun} ended before its first checkpoint"
        return new._replace(message=f"{found.run} is finished, with {limit}, and {ended}: a new run begins")
    return plan._replace(message=f"passed over: {passed_over(found.passed)}" if found.passed else "")


def apply_plan(plan: Plan, parser: ArgumentParser, options: Namespace) -> Changes | None:
    """Write into a fit's options what its run decides, before anything is made of them.

    Args:
        plan: What the fit goes on with.
        parser: Of the options of `fit`.
        options: As parsed; changed in place.

    Returns:
        What the run was and the command is, for `check_changes`; None for a new run.

    Raises:
        ValueError: The run can't go on with a setting.
    """
    if plan.run is None:
        options.resume = False
        return None
    options.resume = str(plan.run)
    now = yaml.safe_load(config_text(parser, options, "fit"))
    before = dict(plan.settings)
    if not (plan.run / "config.yaml").exists():  # the checkpoint knows the network alone
        before = {**now, "model": {**now["model"], **plan.settings["model"]}}
    changes = Changes(before, now)
    _, held = compared(*changes, has_other_pictures=False, allow=options.allow_changes)
    for key, value in held.items():
        options[key] = value
    return changes


def _wanted(said: Namespace) -> Wanted:
    data_class = said.get("data.class_path")

    def has_data_of(run: Path, settings: Mapping[str, Any]) -> bool:
        return is_of_data(run, _data(settings, said), said.get("allow_changes", False))

    return Wanted(
        root=said.get("data.init_args.root"),
        data_class=None if data_class == _ANY_DATA else data_class,
        backbone=said.get("model.backbone"),
        has_data_of=has_data_of,
    )


def _named(run: Path, said: Namespace) -> Found:
    """Return the run that a command names.

    Raises:
        ValueError: It has no checkpoint, or is of other data or another network.
    """
    if len(run.parts) < 3:  # so that it says where runs are
        run = run.absolute()
    if not last_checkpoint(run).is_file():
        raise NotFound(f"--resume {run}: there is no {last_checkpoint(run)} to go on with")
    settings = settings_of(run)
    if difference := _wanted(said).difference(run, settings):
        raise WrongUsage(f"--resume {run}: the run is {difference}")
    return Found(run, settings, None, [])


def _beneath(found: Found, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a run's settings as a config to read before the command line."""
    assert found.run is not None
    settings = dict(found.settings)
    for name in ("resume", "allow_changes", "ckpt_path", "minutes"):  # of the command that began it
        settings.pop(name, None)
    trainer = dict(settings.get("trainer") or {})
    trainer["default_root_dir"] = str(found.run.parents[1])
    if starts_processes():  # torchrun or srun says how many; the run may have begun on another number
        trainer.pop("devices", None)
        trainer.pop("num_nodes", None)
    settings["trainer"] = trainer
    for argument in arguments[1:]:
        # A list that the command gives, or appends to, is not the run's and that again.
        if match := re.match(r"--([\w.]+)\+?(=|$)", argument):
            _drop_list(settings, match[1].split("."))
    return settings


def _drop_list(settings: dict[str, Any], path: list[str]) -> None:
    inner = settings.get(path[0])
    if len(path) == 1 and isinstance(inner, list):
        del settings[path[0]]
    elif isinstance(inner, dict) and len(path) > 1:
        settings[path[0]] = inner = dict(inner)
        _drop_list(inner, path[1:])
        if isinstance(inner.get("init_args"), dict):  # which a flag may leave out
            inner["init_args"] = dict(inner["init_args"])
            _drop_list(inner["init_args"], path[1:])


def _data(settings: Mapping[str, Any], said: Namespace) -> ImageDataModule:
    """Return the data of this command, split and chosen as a run did."""
    data = settings["data"]
    given = said.data.get("init_args") or Namespace()
    parser = OneLineErrorParser()
    parser.add_subclass_arguments(ImageDataModule, "data")
    arguments = {**(data.get("init_args") or {}), **given.as_dict()}
    config = parser.parse_object({"data": {"class_path": data["class_path"], "init_args": arguments}})
    return parser.instantiate_classes(config).data


def _limit_reached(run: Path, options: Namespace) -> str:
    """Return which limit of a command its run has reached, "" for none."""
    trainer = options.trainer
    parser = OneLineErrorParser()
    parser.add_argument("--callbacks", type=list[Callback] | Callback | None)
    made = parser.instantiate_classes(parser.parse_object({"callbacks": trainer.callbacks})).callbacks
    callbacks: list[Callback] = list(made) if isinstance(made, list) else [made] if made else []
    if trainer.max_time is not None:
        callbacks.append(Timer(trainer.max_time))
    if options.patience is not None:
        callbacks.append(patience(options.patience))
    names = ("max_epochs", "max_steps", "min_epochs", "min_steps")
    limits: Any = SimpleNamespace(callbacks=callbacks, **{name: trainer[name] for name in names})
    return ended_by(read_checkpoint(last_checkpoint(run)), limits)
