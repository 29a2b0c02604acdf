"""A first look at flags, before torch is imported: which are none, what was probably meant, which lack a value.

It refuses nothing that the real parser accepts: what depends on a class that the user names is left to that.
"""

import re
from importlib.metadata import version
from typing import Any

from finetune.commands.config_files import find
from finetune.commands.given_arguments import ALONE, Given
from finetune.commands.option_names import (
    AUTO,
    BACKBONES,
    CHOICES,
    DATA,
    LIGHTNING,
    NUMBERS,
    OPTIONS,
    TORCHVISION,
)
from finetune.commands.short_words import WORDS, both, in_full
from finetune.commands.suggestions import nearest_flag
from finetune.system.messages import WrongUsage, did_you_mean

_OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
_NO_NUMBER = re.compile(r"[A-Za-z]+|\d*,\d+")  # others are left to the parser
# networks that are refused, or looked for, where there is more to say of them
_LATER = ("squeezenet", "timm/")
# what YAML may read as something else than text
_WORDS = ("null", "none", "true", "false", "inf", "nan")


def check_flags(command: str, given: Given) -> None:
    """Make sure that a command has these flags.

    Args:
        command: One of `OPTIONS`.
        given: What follows it, flags as typed.

    Raises:
        WrongUsage: It has not, or one has no value; the message says which was probably meant.
    """
    if not version("pytorch-lightning").startswith(f"{LIGHTNING}."):
        return
    for (name, value), typed in zip(given.flags, given.as_typed, strict=True):
        full = in_full(command, name)
        is_known = (full in OPTIONS[command] and typed.startswith("--")) or typed in ("-h", "-c")
        if is_known and value is None and name not in ALONE:
            raise WrongUsage(f"{both(command, full)} needs a value")
        wrong = _wrong_value(full, value) if is_known and value is not None else ""
        if wrong and not (full.startswith("data.") and _may_have_own_data(command, given)):
            raise WrongUsage(f"{both(command, full)} {wrong}")
        if not is_known and not _is_left_to_the_parser(command, typed, full, given):
            raise WrongUsage(f"finetune {command} has no option {typed}{_hint(command, full)}")


def _wrong_value(full: str, value: str) -> str:
    """Return why a value is one that no option of this name takes, "" where it may be right."""
    valid = CHOICES.get(full)
    if valid and value not in valid:
        return f"can't be {value!r}{did_you_mean(value, valid)}"
    if full in NUMBERS and _NO_NUMBER.fullmatch(value) and value.lower() not in _WORDS:
        return f"takes a number, such as 3 or 0.01, not {value!r}"
    if full in ("model.backbone", "backbone") and version("torchvision").startswith(
        f"{TORCHVISION}."
    ):
        return _wrong_backbone(value, may_be_chosen=full == "model.backbone")
    return ""


def _wrong_backbone(value: str, may_be_chosen: bool) -> str:
    """Return why a value names no network, nor several to choose from; "" where it may be right."""
    if may_be_chosen and value == AUTO:
        return ""
    named = [part for part in value.split(",") if part] if may_be_chosen else [value]
    wrong = [
        name for name in named if name not in BACKBONES.split() and not name.startswith(_LATER)
    ]
    return f"can't be {wrong[0]!r}{did_you_mean(wrong[0], BACKBONES.split())}" if wrong else ""


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
        or groups & OPTIONS[command]
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


def _hint(command: str, name: str) -> str:
    """Return the end of the message: what was probably meant, in both spellings, or which command has it."""
    others = [other for other in OPTIONS if name in OPTIONS[other] or name in WORDS[other]]
    if others and name not in OPTIONS[command]:
        word = both(others[0], in_full(others[0], name))
        return f": {word} is one of finetune {others[0]}"
    nearest = nearest_flag(name, WORDS[command], OPTIONS[command])
    if nearest:
        return f"; did you mean {both(command, nearest)}?"
    group, _, last = name.partition(".")
    if group == "data" and last:
        return f"; those of the data are {' '.join(DATA.split())}"
    return f"; finetune {command} --help has those that people use, --help all has all of them"
