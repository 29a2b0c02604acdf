"""Expand shorthands and report wrong flags, before torch is imported.

Nothing that the parser accepts is refused. Whatever depends on a class that the user names is left to the parser.

`options.json` states for which Lightning and torchvision it was generated. With another minor version of Lightning
installed, `trainer.` options (their names and values) are left to the parser: the message is the same, but comes after
the imports. With another minor version of torchvision, that holds for the names of networks.
"""

import json
import os
import re
from importlib.metadata import version
from typing import Any

from finetune.commands.config_files import find
from finetune.commands.flow_yaml import flow_yaml
from finetune.commands.logger_names import LOGGERS, with_class_paths
from finetune.commands.names import names_in_text
from finetune.commands.options import (
    AUTO_BACKBONE,
    BACKBONES,
    LIGHTNING,
    OPTIMIZERS,
    OPTIONS,
    TORCHVISION,
    WORDS,
    flag_names,
    in_full,
)
from finetune.commands.parsed_line import ALONE, ParsedLine
from finetune.commands.suggestions import missing_value_message, unknown_option_message, wrong_value
from finetune.data.class_weights import BALANCED, parse_class_weights
from finetune.system.messages import NotFound, WrongUsage, did_you_mean

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
# Prefixes of networks that are checked later, with better messages.
_LATER = ("squeezenet", "timm/")
_SIMPLE_NAME = re.compile(r"[\w./~-]+")
_BACKBONE_OPTIONS = ("model.backbone", "backbone")


def check_flags(command: str, line: ParsedLine) -> None:
    """Check that a command has these flags and that their values can be right.

    Args:
        command: One of `OPTIONS`.
        line: The arguments after it, flags as typed.

    Raises:
        WrongUsage: The option does not exist, or its value is missing or wrong; the message suggests the right one.
    """
    for (name, value), typed in zip(line.flags, line.as_typed, strict=True):
        full = in_full(command, name)
        message = _mistake(command, line, full, value, typed)
        if message and (not full.startswith("trainer.") or _is_lightning_known()):
            raise WrongUsage(message)


def _is_lightning_known() -> bool:
    return version("pytorch-lightning").startswith(f"{LIGHTNING}.")


def _is_torchvision_known() -> bool:
    return version("torchvision").startswith(f"{TORCHVISION}.")


def _mistake(command: str, line: ParsedLine, full: str, value: str | None, typed: str) -> str:
    """Return what is wrong with a flag; "" if nothing is, or if the parser decides."""
    is_known = (full in OPTIONS[command] and typed.startswith("--")) or typed in ("-h", "-c")
    if not is_known:
        is_left = _is_left_to_the_parser(command, typed, full, line)
        return "" if is_left else unknown_option_message(command, typed)
    if value is None:
        return "" if full in ALONE else missing_value_message(command, full)
    wrong = wrong_value(value, OPTIONS[command][full])
    if full in _BACKBONE_OPTIONS:
        wrong = _wrong_backbone(value, may_be_chosen=full == "model.backbone")
    if not wrong or (full.startswith("data.") and _may_have_own_data(command, line)):
        return ""
    return f"{flag_names(command, full)} {wrong}"


def _wrong_backbone(value: str, may_be_chosen: bool) -> str:
    """Return why a value names neither a network nor several to choose from; "" if it may be right."""
    if may_be_chosen and value == AUTO_BACKBONE:
        return ""
    named = [part for part in value.split(",") if part] if may_be_chosen else [value]
    wrong = [name for name in named if name not in BACKBONES and not name.startswith(_LATER)]
    if not wrong or not _is_torchvision_known():
        return ""
    hint = did_you_mean(wrong[0], BACKBONES) or "."
    return f"cannot be {wrong[0]!r}{hint} Networks of timm are timm/NAME"


def _is_left_to_the_parser(command: str, typed: str, full: str, line: ParsedLine) -> bool:
    """Return whether an option that this module does not know may still be valid."""
    if not typed.startswith("--"):
        return False
    name = full.rstrip("+")
    parts = name.split(".")
    groups = {".".join(parts[:n]) for n in range(2, len(parts))}
    if (
        name in OPTIONS[command]
        or name.startswith("print_")
        or parts[-1] == "help"
        or groups & OPTIONS[command].keys()
    ):
        return True
    return (
        parts[0] == "data"
        and len(parts) > 1
        and (parts[1] in _CLASS_KEYS or _may_have_own_data(command, line))
    )


def _may_have_own_data(command: str, line: ParsedLine) -> bool:
    """Return whether the data module may be a class of the user, with other arguments."""
    if command not in WORDS or line.has("data", "data.class_path"):
        return True
    return any(_has_own_data(value or "") for name, value in line.flags if name == "config")


def _has_own_data(config: str) -> bool:
    import yaml  # takes time, and is needed only if an option of the data is mistyped

    try:
        with open(find(config), encoding="utf-8") as file:
            content: Any = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return True
    data = (content if isinstance(content, dict) else {}).get("data") or {}
    return not isinstance(data, dict) or not str(data.get("class_path", "finetune.")).startswith(
        "finetune."
    )


def replace_shorthands(command: str, line: ParsedLine) -> None:
    """Replace shorthands: names in another case, and names of loggers.

    Args:
        command: The command.
        line: The arguments that follow it; changed in place.

    Raises:
        WrongUsage: An option that takes a group of settings has a name; the message suggests the right option.
    """
    optimizers = {name.lower(): name for name in OPTIMIZERS}
    for i, (name, value) in enumerate(line.flags):
        full = in_full(command, name)
        if value is None:
            continue
        _check_group(command, full, value)
        line.flags[i] = name, names_in_text(full, value)
        if full == "model.class_weights":
            line.flags[i] = name, _class_weights(command, full, value)
        elif full == "trainer.logger":
            line.flags[i] = name, _loggers(command, full, value)
        elif full == "model.optimizer":
            line.flags[i] = name, optimizers.get(value.lower(), value)
        elif full in _BACKBONE_OPTIONS and _is_torchvision_known():
            line.flags[i] = name, ",".join(network_name(part.strip()) for part in value.split(","))


def _class_weights(command: str, full: str, value: str) -> str:
    """Return the weights of classes as JSON, with the content of the file; `balanced` and null as they are."""
    if value in (BALANCED, "null"):
        return value
    try:
        weights = parse_class_weights(value)
    except FileNotFoundError as error:
        raise NotFound(str(error).replace("class_weights", flag_names(command, full), 1)) from error
    except WrongUsage as error:
        raise WrongUsage(
            str(error).replace("class_weights", flag_names(command, full), 1)
        ) from error
    return json.dumps(weights, ensure_ascii=False)


def _loggers(command: str, full: str, value: str) -> str:
    """Return class paths for the names of loggers; another value as it is."""
    if value.islower() and value.isalpha() and value not in (*LOGGERS, "true", "false", "null"):
        valid = ", ".join(LOGGERS)
        raise WrongUsage(
            f"{flag_names(command, full)} cannot be {value!r}; valid are {valid}, or a class path"
        )
    loggers = with_class_paths(value)
    return loggers if isinstance(loggers, str) else flow_yaml(loggers)


def network_name(name: str) -> str:
    """Return the full name of a network: torchvision's in lower case; others as they are."""
    if name.lower() == AUTO_BACKBONE:
        return AUTO_BACKBONE
    return name.lower() if name.lower() in BACKBONES else name


def _check_group(command: str, full: str, value: str) -> None:
    """Refuse a name as the value of an option that takes a table of settings."""
    if (
        full not in ("model", "trainer", "data")
        or not _SIMPLE_NAME.fullmatch(value)
        or os.path.isfile(value)
    ):
        return
    if full == "data":
        if os.path.isdir(value) or "/" in value or (value[0].islower() and "." not in value):
            option = "data.predict" if command == "predict" else "data.root"
            raise WrongUsage(
                f"--data takes a data class, not {value!r}; did you mean {flag_names(command, option)}?"
            )
        return
    hint = (
        f"; did you mean {flag_names(command, 'model.backbone')} {value}?"
        if full == "model"
        else ""
    )
    raise WrongUsage(
        f"--{full} takes a table of settings, or a YAML file of them, not {value!r}{hint}"
    )
