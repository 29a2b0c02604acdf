"""Flags before torch is imported: shorthands become what they stand for, and mistakes end in one line.

Nothing that the parser accepts is refused. Whatever depends on a class that the user names is left to the parser.

`options.json` states for which Lightning and torchvision it was generated. With another minor version of Lightning
installed, `trainer.` options (their names and values) are left to the parser: the message is the same, but comes after
the imports. With another minor version of torchvision, that holds for the names of networks.
"""

import importlib.util
import os
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune.commands.config_files import find
from finetune.commands.given_arguments import ALONE, LOGGERS, Given
from finetune.commands.options import (
    AUTO_BACKBONE,
    BACKBONES,
    LIGHTNING,
    OPTIMIZERS,
    OPTIONS,
    TORCHVISION,
    WORDS,
    both,
    in_full,
)
from finetune.commands.suggestions import needs_value, no_option, wrong_value
from finetune.system.messages import WrongUsage, did_you_mean

_OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
# networks that are refused, or looked for, where there is more to say of them
_LATER = ("squeezenet", "timm/")
_SIMPLE_NAME = re.compile(r"[\w./~-]+")
_BACKBONE_OPTIONS = ("model.backbone", "backbone")


def check_flags(command: str, given: Given) -> None:
    """Check that a command has these flags and that their values can be right.

    Args:
        command: One of `OPTIONS`.
        given: What follows it, flags as typed.

    Raises:
        WrongUsage: It has no such option, or the value is missing or wrong; the message suggests the right one.
    """
    for (name, value), typed in zip(given.flags, given.as_typed, strict=True):
        full = in_full(command, name)
        message = _mistake(command, given, full, value, typed)
        if message and (not full.startswith("trainer.") or _is_lightning_known()):
            raise WrongUsage(message)


def _is_lightning_known() -> bool:
    return version("pytorch-lightning").startswith(f"{LIGHTNING}.")


def _is_torchvision_known() -> bool:
    return version("torchvision").startswith(f"{TORCHVISION}.")


def _mistake(command: str, given: Given, full: str, value: str | None, typed: str) -> str:
    """Return what is wrong with a flag; "" where nothing is, or where the parser decides."""
    is_known = (full in OPTIONS[command] and typed.startswith("--")) or typed in ("-h", "-c")
    if not is_known:
        is_left = _is_left_to_the_parser(command, typed, full, given)
        return "" if is_left else no_option(command, typed)
    if value is None:
        return "" if full in ALONE else needs_value(command, full)
    wrong = wrong_value(value, OPTIONS[command][full])
    if full in _BACKBONE_OPTIONS:
        wrong = _wrong_backbone(value, may_be_chosen=full == "model.backbone")
    if not wrong or (full.startswith("data.") and _may_have_own_data(command, given)):
        return ""
    return f"{both(command, full)} {wrong}"


def _wrong_backbone(value: str, may_be_chosen: bool) -> str:
    """Return why a value names no network, nor several to choose from; "" where it may be right."""
    if may_be_chosen and value == AUTO_BACKBONE:
        return ""
    named = [part for part in value.split(",") if part] if may_be_chosen else [value]
    wrong = [name for name in named if name not in BACKBONES and not name.startswith(_LATER)]
    if not wrong or not _is_torchvision_known():
        return ""
    return f"can't be {wrong[0]!r}{did_you_mean(wrong[0], BACKBONES)}"


def _is_left_to_the_parser(command: str, typed: str, full: str, given: Given) -> bool:
    """Return whether something that is not known here may be an option all the same."""
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
        and (parts[1] in _OF_CLASSES or _may_have_own_data(command, given))
    )


def _may_have_own_data(command: str, given: Given) -> bool:
    """Return whether the data module may be a class of the user's, with arguments of its own."""
    if command not in WORDS or given.has("data", "data.class_path", "trust_modules"):
        return True
    return any(_has_own_data(value or "") for name, value in given.flags if name == "config")


def _has_own_data(config: str) -> bool:
    import yaml  # only who mistypes an option of the data pays for it

    try:
        with open(find(config), encoding="utf-8") as file:
            content: Any = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return True
    data = (content if isinstance(content, dict) else {}).get("data") or {}
    return not isinstance(data, dict) or not str(data.get("class_path", "finetune.")).startswith(
        "finetune."
    )


def replace_shorthands(command: str, given: Given) -> None:
    """Replace shorthands: names in another case, timm's networks without `timm/`, and flags such as `--wandb`.

    Args:
        command: The command.
        given: The arguments that follow it; changed in place.

    Raises:
        WrongUsage: A name stands where a group of settings is expected; the message suggests the right option.
    """
    optimizers = {name.lower(): name for name in OPTIMIZERS}
    for i, (name, value) in enumerate(given.flags):
        full = in_full(command, name)
        if value is None:
            continue
        _check_group(command, full, value)
        if full == "model.optimizer":
            given.flags[i] = name, optimizers.get(value.lower(), value)
        elif full in _BACKBONE_OPTIONS and _is_torchvision_known():
            given.flags[i] = name, ",".join(network_name(part.strip()) for part in value.split(","))
    if command in ("fit", "benchmark"):
        _replace_logger_flags(given)


def _replace_logger_flags(given: Given) -> None:
    """Replace flags such as `--wandb` by `--trainer.logger`; their loggers follow those that it already names."""
    asked = [LOGGERS[name] for name, value in given.flags if name in LOGGERS and value != "false"]
    kept = [i for i, (name, _) in enumerate(given.flags) if name not in LOGGERS]
    given.as_typed = [given.as_typed[i] for i in kept]
    given.flags = [given.flags[i] for i in kept]
    has_others = given.has("trainer.logger", "trainer.logger+")
    if asked and not has_others:
        given.flags.append(
            ("trainer.logger", asked[0] if len(asked) == 1 else f"[{', '.join(asked)}]")
        )
    elif asked:
        given.flags += [("trainer.logger+", name) for name in asked]
    num_added = len(given.flags) - len(given.as_typed)
    given.as_typed += ["--trainer.logger"] * num_added


def network_name(name: str) -> str:
    """Return the full name of a network: torchvision's in lower case, timm's with `timm/`; others as they are."""
    if name.lower() == AUTO_BACKBONE:
        return AUTO_BACKBONE
    if name in BACKBONES or name.startswith("timm/"):
        return name
    if name.lower() in BACKBONES:
        return name.lower()
    return f"timm/{name}" if name.partition(".")[0] in _names_of_timm() else name


@cache
def _names_of_timm() -> frozenset[str]:
    """Return the names of timm's networks from its source, since its import takes seconds; none if it is missing."""
    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in Path(folder, "models").glob("*.py")]
    texts = (path.read_text("utf-8", "replace") for path in files)
    return frozenset(
        name for text in texts for name in re.findall(r"^@register_model\ndef (\w+)\(", text, re.M)
    )


def _check_group(command: str, full: str, value: str) -> None:
    """Refuse a name where a table of settings is expected."""
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
                f"--data takes a data class, not {value!r}; did you mean {both(command, option)}?"
            )
        return
    hint = f"; did you mean {both(command, 'model.backbone')} {value}?" if full == "model" else ""
    raise WrongUsage(
        f"--{full} takes a table of settings, or a YAML file of them, not {value!r}{hint}"
    )
