"""Loggers by name: TensorBoardLogger, WandbLogger and MLFlowLogger are our classes, which use the run's folder."""

import re
from typing import Any

import yaml

from finetune.commands.explicit_settings import flag_settings
from finetune.commands.flow_yaml import flow_yaml
from finetune.commands.parsed_line import LOGGERS, ParsedLine
from finetune.system.messages import WrongUsage, did_you_mean

_OURS = tuple(LOGGERS.values())
_LIGHTNINGS = ("CometLogger", "CSVLogger", "LitLogger")
_BARE = re.compile("[A-Za-z]+")
_NO_NAMES = ("true", "false", "null", "none", "yes", "no", "on", "off")
_NAME = re.compile(rf"(?:pytorch_lightning\.loggers\.(?:\w+\.)?)?({'|'.join(_OURS)})")
_CSV = re.compile(r"(?:pytorch_lightning\.loggers\.(?:csv_logs\.)?)?CSVLogger")
_OPTION = re.compile(r"trainer\.logger(?:\.class_path|\.help)?\+?")


def replace_logger_names(line: ParsedLine) -> None:
    """Replace the names of our loggers on a command line by their class paths.

    Raises:
        WrongUsage: There is no logger of this name, or it is Lightning's CSVLogger without a folder.
    """
    for i, (name, value) in enumerate(line.flags):
        if value is None or not _OPTION.fullmatch(name):
            continue
        flag = f"--{name}"
        _check(flag, value)
        line.flags[i] = name, _in_text(value)
        is_csv = _CSV.fullmatch(value) and not name.endswith(".help")
        if is_csv and "trainer.logger.save_dir" not in flag_settings(line):
            hint = "a run's metrics.csv and steps.csv have all logged values: remove it, or set its address by"
            raise WrongUsage(f"{flag} {value}: {hint} --trainer.logger.save_dir FOLDER")


def replace_in_config(content: Any) -> Any:
    """Return the content of a config, or of --trainer, with the names of our loggers replaced by class paths."""
    if not isinstance(content, dict):
        return content
    if "logger" in content:
        return content | {"logger": with_class_paths(content["logger"])}
    return (
        content | {"trainer": replace_in_config(content["trainer"])}
        if "trainer" in content
        else content
    )


def with_class_paths(value: Any) -> Any:
    """Return the value of a logger setting with the names of our loggers replaced by class paths."""
    if isinstance(value, list):
        return [with_class_paths(item) for item in value]
    if isinstance(value, dict) and "class_path" in value:
        return value | {"class_path": with_class_paths(value["class_path"])}
    value = _in_full(value) if isinstance(value, str) else value
    match = _NAME.fullmatch(value) if isinstance(value, str) else None
    return f"finetune.{match[1]}" if match else value


def _in_full(name: str) -> str:
    """Return `WandbLogger` for `wandb`, in any case."""
    full_names = {**LOGGERS, **{full.lower(): full for full in _OURS}}
    return full_names.get(name.lower(), name)


def _check(flag: str, value: str) -> None:
    """Make sure that a bare name is that of a logger. A class path or a file is left to jsonargparse."""
    names = [name.strip() for name in value.strip("[] ").split(",")]
    is_bare = all(_BARE.fullmatch(name) for name in names)
    if not is_bare or value.lower() in _NO_NAMES:
        return
    for name in map(_in_full, names):
        if name not in _OURS + _LIGHTNINGS:
            hint = did_you_mean(name, _OURS) or f"; valid are {', '.join(_OURS)}"
            raise WrongUsage(f"{flag}: there is no logger {name!r}{hint}")
    if value != names[0] and not (value.startswith("[") and value.endswith("]")):
        raise WrongUsage(f"{flag} takes several loggers in brackets: '[{', '.join(names)}]'")


def _in_text(text: str) -> str:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    replaced = with_class_paths(value)
    if replaced == value:
        return text
    return replaced if isinstance(replaced, str) else flow_yaml(replaced)
