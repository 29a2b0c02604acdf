"""Messages about wrong options, with the option that was probably meant.

Both the checks before torch is imported and the parser use them.
"""

import difflib
import importlib
import re
from collections.abc import Collection, Mapping

from finetune.commands.options import (
    OPTIONS,
    SYNONYMS,
    TABLE,
    WORDS,
    Kind,
    flag_names,
    in_full,
)
from finetune.system.messages import did_you_mean

# The modules with the classes that an option can name.
_CLASSES = {
    "model.optimizer": "torch.optim",
    "model.scheduler": "torch.optim.lr_scheduler",
    "trainer.callbacks": "pytorch_lightning.callbacks",
}
_BASES = {"Optimizer", "LRScheduler", "Callback"}  # base classes, which cannot be used


# Other values are left to the parser.
_NO_NUMBER = re.compile(r"[A-Za-z]+|\d*,\d+")
_NO_WHOLE_NUMBER = re.compile(rf"{_NO_NUMBER.pattern}|[+-]?\d*\.\d*|\d+[eE]\d+")
# YAML may read these as something other than text
_YAML_WORDS = ("", "~", "null", "none", "true", "false", "inf", "nan")


def unknown_option_message(command: str, typed: str, valid: Collection[str] | None = None) -> str:
    """Return the message about an option that a command does not have.

    Args:
        command: The command; "" for the arguments of a class that an option names.
        typed: The flag as typed, with its dashes; or a key of a config.
        valid: The full names of all options; by default those of `options.json`.
    """
    valid = OPTIONS[command] if valid is None else valid
    if command and typed.startswith("-"):
        words = WORDS.get(command, {})
        name = words.get(typed.lstrip("-"), typed.lstrip("-"))
        return f"finetune {command} has no option {typed}{_hint(command, name, valid)}"
    nearest = nearest_option(typed.lstrip("-"), valid)
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    start = f"finetune {command} has" if command else "there is"
    return f"{start} no option {typed!r}{hint}"


def _hint(command: str, name: str, valid: Collection[str]) -> str:
    """Return the end of the message: the option that was probably meant, or the command that has this option."""
    others = [other for other in OPTIONS if name in OPTIONS[other] or name in WORDS[other]]
    is_synonym = any(name in row.synonyms for row in TABLE if command in row.commands)
    # A command without short words has option names of its own: suggest its nearest one.
    if others and name not in valid and not is_synonym and command in WORDS:
        word = flag_names(others[0], in_full(others[0], name))
        return f": {word} is one of finetune {others[0]}"
    nearest = nearest_option(name, valid, WORDS.get(command, {}))
    if nearest:
        return f"; did you mean {flag_names(command, nearest)}?"
    group, _, last = name.partition(".")
    if group == "data" and last:
        names = sorted(full.removeprefix("data.") for full in valid if full.startswith("data."))
        if names:
            return f"; those of the data are {' '.join(names)}"
    if command not in WORDS:
        return f"; finetune {command} --help has all of them"
    return f"; finetune {command} --help has those that people use, --help all has all of them"


def missing_value_message(command: str, full: str) -> str:
    """Return the message about an option that has no value."""
    return f"{flag_names(command, full)} needs a value"


def wrong_value(value: str, kind: Kind) -> str:
    """Return why a value is wrong for an option of this kind; "" if it may be right."""
    if value.lower() in _YAML_WORDS:
        return ""
    if isinstance(kind, list) and value not in kind:
        return f"cannot be {value!r}{did_you_mean(value, kind)}"
    if kind == "whole number" and _NO_WHOLE_NUMBER.fullmatch(value):
        return f"takes a whole number, such as 3, not {value!r}"
    if kind == "number" and _NO_NUMBER.fullmatch(value):
        return f"takes a number, such as 3 or 0.01, not {value!r}"
    return ""


def nearest_option(
    key: str, valid: Collection[str], words: Mapping[str, str] | None = None
) -> str | None:
    """Return the option that was probably meant: the one of this name in other tools, or of the most similar name.

    Args:
        key: The flag as typed, without its dashes, or a key of a config.
        valid: The full names of all options.
        words: The full name of each short word.
    """
    key = key.replace("-", "_").lower()
    if key in valid:
        return key
    last = key.rpartition(".")[2]
    meant = {full.rpartition(".")[2]: full for full in sorted(valid, reverse=True)}
    for full, synonyms in SYNONYMS.items():
        # within a class that a class_path names, keys are valid without their group
        for option in {full, full.rpartition(".")[2]} & set(valid):
            meant |= dict.fromkeys(synonyms, option)
    meant |= words or {}
    if last in meant:
        return meant[last]
    near = difflib.get_close_matches(last, meant, n=1, cutoff=0.75)
    return meant[near[0]] if near else None


def class_names(option: str) -> list[str]:
    """Return the classes that an option can name without a module; an empty list if this is unknown."""
    if (home := _CLASSES.get(option)) is None:
        return []
    module = importlib.import_module(home)  # the parser has imported it already
    own = (
        key
        for key, value in vars(module).items()
        if str(getattr(value, "__module__", "")).startswith(home)
    )
    return sorted(key for key in own if key[0].isupper() and key not in _BASES)
