"""`--resume`: find the run that a fit continues, once, and use its settings where the command line has none.

`--name` is checked here too: it names a new run or the one to continue.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from pytorch_lightning.callbacks import Callback

from finetune.commands.explicit_settings import read_explicit_settings
from finetune.commands.parser import OneLineErrorParser
from finetune.commands.plan import Plan
from finetune.commands.trainer import DEFAULTS, patience
from finetune.data.addresses import joined
from finetune.data.data_place import at_place
from finetune.data.datamodule import ImageDataModule
from finetune.distributed.launch import has_launcher
from finetune.models.candidates import is_choice
from finetune.runs.best_epoch import MONITORS
from finetune.runs.changes import compare_settings
from finetune.runs.folder import (
    check_name,
    check_unused,
    config_text,
    has_result,
    last_checkpoint,
    runs_elsewhere,
)
from finetune.runs.lightning_callbacks import Limits, ended_by
from finetune.runs.local_copies import local_root, shown_place
from finetune.runs.newest_run import (
    NewestRun,
    RunFilter,
    check_has_last,
    describe_skipped,
    find_run,
    new_run_message,
    settings_of,
    working_dir_of,
)
from finetune.runs.resume import Changes, Start, check_resumable, read_start
from finetune.runs.run_download import fetch_run
from finetune.runs.run_search import check_is_in, runs_of
from finetune.system.messages import NotFound, WrongUsage

# the default, which continues a run of any data class on its folder
_ANY_DATA = "finetune.ImageFolderData"


def find_run_to_resume(parser: ArgumentParser, arguments: Sequence[str]) -> Plan:
    """Return the plan of a fit: whether it continues a run, which one, and its checkpoint.

    Args:
        parser: The parser of the command; here it reads the explicit options, without defaults.
        arguments: The complete command line.

    Raises:
        ValueError: The run that `--resume` names is of other data or another network, or has no checkpoint from which
            training can continue; or there is neither a run to continue nor data for a new one.
    """
    new = Plan(list(arguments))
    explicit = _explicit_options(parser, arguments)
    if explicit is None or not explicit.get("resume"):
        return new
    read = cache(read_start)  # each checkpoint is read only once
    root = local_root(str(explicit.get("trainer.default_root_dir") or DEFAULTS["default_root_dir"]))
    if isinstance(explicit.resume, str):
        search = _run_by_path(Path(explicit.resume), explicit, read)
        check_is_in(explicit.get("trainer.default_root_dir"), Path(explicit.resume))
    elif explicit.get("name"):
        search = _run_by_name(root / "fit" / explicit.name, explicit, read)
    else:
        search = find_run(root, _wanted(explicit), read)
    if search.run is None:
        _check_has_data(explicit, root, search)
        if explicit.get("name"):
            run = root / "fit" / explicit.name
            return new.with_messages(f"--resume found no run {shown_place(run)}: a new run begins")
        return new.with_messages(new_run_message(root, search.skipped, search.elsewhere))
    start = read(last_checkpoint(search.run))
    check_resumable(start)
    settings = _settings_below_command_line(search, arguments)
    plan = Plan(
        [arguments[0], "--config", yaml.safe_dump(settings), *arguments[1:]],
        run=search.run,
        settings=search.settings,
        start=start,
        newer=search.newer(),
    )
    options = parser.parse_args(plan.arguments)[arguments[0]] if search.begun else None
    if options is not None and (limit := ended_by(start.content, _limits(options, start.content))):
        # The user means the later run, not the finished one before it.
        ended = f"{search.begun} ended before its first checkpoint"
        return new.with_messages(
            f"{search.run} is finished, with {limit}, and {ended}: a new run begins"
        )
    return plan.with_messages(
        f"passed over: {describe_skipped(search.skipped)}" if search.skipped else ""
    )


def _explicit_options(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace | None:
    """Return the options that the command line gives, without defaults; None if it cannot ask for `--resume`."""
    if not any(re.match(r"--(resume|config)(=|$)", argument) for argument in arguments):
        return None
    # --print_config prints defaults, too, which the call below omits
    if any(argument.startswith("--print_config") for argument in arguments):
        return None
    # The parser requires data, which may be in the settings of the run.
    return parser.parse_args([arguments[0], "--data", _ANY_DATA, *arguments[1:]], defaults=False)[
        arguments[0]
    ]


def _check_has_data(explicit: Namespace, root: Path, search: NewestRun) -> None:
    """Make sure that there is data for a new run.

    Raises:
        NotFound: There is none.
    """
    is_folder = explicit.get("data.class_path") == _ANY_DATA
    if is_folder and _explicit_place(explicit) is None:
        why = f", since {describe_skipped(search.skipped)}" if search.skipped else ""
        hint = "and there is no data for a new one: finetune fit FOLDER --resume"
        raise NotFound(f"--resume found no run in {shown_place(root)} to continue{why}, {hint}")


def _explicit_place(explicit: Namespace) -> str | None:
    """Return the table or folder of images that the command line gives; None for none."""
    return explicit.get("data.init_args.table") or explicit.get("data.init_args.root")


def put_settings_of_run(plan: Plan, parser: ArgumentParser, options: Namespace) -> Changes | None:
    """Write the settings that a continued run does not change into a fit's options, before classes are instantiated.

    Args:
        plan: Whether the fit continues a run, and which.
        parser: The parser of the options of `fit`.
        options: As parsed; changed in place.

    Returns:
        The settings of the run and of the command, for `check_changes`; None for a new run.

    Raises:
        ValueError: The run cannot continue with a setting.
    """
    if plan.run is None:
        options.resume = False
        return None
    options.resume = str(plan.run)
    if is_choice(options.model.backbone):  # the run has chosen
        for name in ("backbone", "weights"):
            options.model[name] = plan.settings["model"].get(name)
    now = yaml.safe_load(config_text(parser, options, "fit"))
    before = dict(plan.settings)
    # the checkpoint has the settings of network and data only
    if not plan.has_config:
        before = {**now, "model": {**now["model"], **plan.settings["model"]}}
        data = plan.settings.get("data", {})
        before["data"] = {
            **now["data"],
            **data,
            "init_args": {**now["data"]["init_args"], **data.get("init_args", {})},
        }
    changes = Changes(before, now)
    _, held = compare_settings(*changes, has_other_images=False, allow=options.allow_changes)
    for key, value in held.items():
        options[key] = value
    return changes


def _wanted(explicit: Namespace) -> RunFilter:
    """Return the data and the network that a command names."""
    data_class = explicit.get("data.class_path")
    backbone = explicit.get("model.backbone")
    return RunFilter(
        root=_explicit_place(explicit),
        data_class=None if data_class == _ANY_DATA else data_class,
        backbone=None if is_choice(backbone) else backbone,
        is_ranked=is_choice(backbone) and not isinstance(explicit.resume, str),
    )


def _run_by_path(run: Path, explicit: Namespace, read: Callable[[Path], Start]) -> NewestRun:
    """Return the run that `--resume` names.

    Raises:
        ValueError: It has no checkpoint, or is of other data or another network.
    """
    if len(run.parts) < 3 or ".." in run.parts:  # `_folder_of_runs` is its second parent
        run = Path(os.path.abspath(run))
    fetch_run(run)
    check_has_last(run)
    if not last_checkpoint(run).is_file():
        last = shown_place(last_checkpoint(run))
        raise NotFound(f"--resume {shown_place(run)}: there is no {last} to continue from")
    settings = settings_of(run, read)
    # The images may be in another folder now. `check_changes` compares them.
    wanted = replace(_wanted(explicit), root=None)
    if difference := wanted.difference(run, settings):
        raise WrongUsage(f"--resume {run}: the run is {difference}")
    root = _folder_of_runs(run)
    return NewestRun(run, settings, None, [], runs_elsewhere(root, runs_of(root)))


def _run_by_name(run: Path, explicit: Namespace, read: Callable[[Path], Start]) -> NewestRun:
    """Return the run that `--name` names, or none if there is nothing of that name that has trained."""
    fetch_run(run)
    if not run.exists() or not has_result(run):
        return NewestRun(None, {}, None, [], [])
    return _run_by_path(run, explicit, read)


def _folder_of_runs(run: Path) -> Path:
    """Return the folder of all runs: `runs` of `runs/fit/version_0`, and / of /run, which a container may mount."""
    return run.parent.parent


def _settings_below_command_line(search: NewestRun, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a run's settings as a config that the parser reads before the command line, which overrides them.

    It lacks settings that belong to the command that began the run, and lists that the command line replaces.
    """
    assert search.run is not None
    settings = dict(search.settings)
    # options of the command that began the run
    for name in ("resume", "allow_changes", "ckpt_path", "minutes"):
        settings.pop(name, None)
    trainer = dict(settings.get("trainer") or {})
    trainer["default_root_dir"] = str(_folder_of_runs(search.run))
    if has_launcher():  # torchrun or srun decides; the run may have begun with another number
        trainer.pop("devices", None)
        trainer.pop("num_nodes", None)
    settings["trainer"] = trainer
    _leave_old_place(settings, arguments)
    _locate_data(settings, working_dir_of(search.run))
    for argument in arguments[1:]:
        # A list on the command line replaces the list of the run; it does not extend it.
        if match := re.match(r"--([\w.]+)\+?(=|$)", argument):
            _drop_list(settings, match[1].split("."))
    return settings


def _locate_data(settings: dict[str, Any], folder: str) -> None:
    """Make relative paths of the data those of the folder in which the run began, which may not be this one."""
    data = settings.get("data") or {}
    arguments = data.get("init_args") or {}
    if not os.path.isdir(folder) or os.path.samefile(folder, os.curdir):
        return
    located = {
        name: joined(folder, arguments[name])
        for name in ("root", "table", "corrections")
        if arguments.get(name)
    }
    if located:
        settings["data"] = {**data, "init_args": {**arguments, **located}}


def _leave_old_place(settings: dict[str, Any], arguments: Sequence[str]) -> None:
    """Drop the folder or table of a run if the command line gives another; see `at_place`."""
    data = settings.get("data") or {}
    explicit = read_explicit_settings(arguments).arguments_of("data")
    settings["data"] = {**data, "init_args": at_place(data.get("init_args") or {}, explicit)}


def _drop_list(settings: dict[str, Any], path: list[str]) -> None:
    """Remove the list at a path of keys, if there is one; flags may omit `init_args` in the path."""
    inner = settings.get(path[0])
    if len(path) == 1 and isinstance(inner, list):
        del settings[path[0]]
    elif isinstance(inner, dict) and len(path) > 1:
        settings[path[0]] = inner = dict(inner)
        _drop_list(inner, path[1:])
        if isinstance(inner.get("init_args"), dict):
            inner["init_args"] = dict(inner["init_args"])
            _drop_list(inner["init_args"], path[1:])


def data_module(class_path: str, arguments: Mapping[str, Any]) -> ImageDataModule:
    """Return a data module.

    Raises:
        ArgumentError: The class does not take these arguments.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ImageDataModule, "data")
    config = parser.parse_object({"data": {"class_path": class_path, "init_args": dict(arguments)}})
    return parser.instantiate(config).data


def _limits(options: Namespace, checkpoint: Mapping[str, Any]) -> Limits:
    """Return the limits that can end a fit, from its options and a checkpoint of the fit."""
    trainer = options.trainer
    parser = OneLineErrorParser()
    parser.add_argument("--callbacks", type=list[Callback] | Callback | None)
    made = parser.instantiate(parser.parse_object({"callbacks": trainer.callbacks})).callbacks
    callbacks: list[Callback] = list(made) if isinstance(made, list) else [made] if made else []
    if options.patience is not None:
        monitor = MONITORS[checkpoint["hyper_parameters"].get("label_kind", "single")]
        callbacks.append(patience(options.patience, monitor=monitor))
    return Limits(
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        callbacks=callbacks,
    )


def check_run_name(options: Namespace) -> None:
    """Make sure that the run of a fit can have the name that the options give it, if any.

    Args:
        options: Those of the fit; `resume` is the folder of the run that it continues, or False.

    Raises:
        WrongUsage: It is not a plain name, it is taken, or the run that is resumed has another.
    """
    name = options.name
    if name is None:
        return
    check_name(name)
    if not options.resume:
        check_unused(Path(options.trainer.default_root_dir, "fit", name))
    elif Path(options.resume).resolve().name != name:
        raise WrongUsage(
            f"--name {name}: the run to continue is {options.resume}, which keeps its name: omit --name"
        )
