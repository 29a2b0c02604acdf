"""Translate the arguments of `finetune.fit` into a command line, and suggest the right name for a wrong one."""

import inspect
import numbers
import os
from collections.abc import Callable, Container, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from finetune.commands.flow_yaml import flow_yaml
from finetune.commands.names import holds_names
from finetune.commands.options import OPTIONS, WORDS, flag_names, in_full
from finetune.commands.parsed_line import ALONE, ParsedLine, format_line, is_flag
from finetune.commands.suggestions import nearest_option
from finetune.system.messages import WrongUsage

# Options that need no value.
_SWITCHES = ("resume",)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_hints(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Add the argument that was probably meant to Python's error about an unknown argument."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in parameters:
                # the same text as Python's error
                message = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{message}{_hint(name, parameters)}")
        return function(*args, **kwargs)

    return wrapper


def passed_arguments(
    function: Callable[..., object], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call that are not the function's defaults."""
    parameters = inspect.signature(function).parameters
    return {
        name: value for name, value in arguments.items() if value is not parameters[name].default
    }


def _hint(name: str, parameters: Container[str]) -> str:
    """Return the end of a message about an unknown argument."""
    if name in ("data", "root", "path"):
        return "; did you mean 'folder'?"
    full = (
        "model.backbone" if name == "model" else nearest_option(name, OPTIONS["fit"], WORDS["fit"])
    )
    if full is None:
        return "; help(finetune.fit) lists the arguments"
    word = next((word for word, meant in WORDS["fit"].items() if meant == full), full)
    return (
        f"; did you mean {word!r}?"
        if word in parameters
        else f"; did you mean options={{{full!r}: …}}?"
    )


def command_line(
    folder: object, words: Mapping[str, Any], options: Mapping[str, Any], command: str = "fit"
) -> list[str]:
    """Return the equivalent arguments of `finetune`.

    Raises:
        TypeError: A value cannot be written on a command line.
        WrongUsage: An option is passed twice, or only prints.
    """
    if not isinstance(options, Mapping):
        raise TypeError(
            f"options maps full names to values, such as {{'data.val_fraction': 0.2}}, not {options!r}"
        )
    line = ParsedLine()
    for name, value in words.items():
        _append(line, command, name, value, name)
    for name, value in options.items():
        _append(line, command, name, value, f"options[{name!r}]")
    arguments = format_line(command, line)
    if folder is None:
        return arguments
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"the folder of images is a path, not {folder!r}")
    path = os.fsdecode(folder)
    if is_flag(path) or path == "--":
        return [*arguments, "--", path]
    return [arguments[0], path, *arguments[1:]]


def _append(line: ParsedLine, command: str, name: object, value: Any, shown: str) -> None:
    """Append an option to a line, or nothing for a switch that is off.

    Args:
        line: The line, which is changed.
        command: The command.
        name: The short word or the full name of the option.
        value: Its value.
        shown: The name of the argument in messages.

    Raises:
        TypeError: The name is not text, or the value cannot be written on a command line.
        WrongUsage: The option is on the line already, or only prints.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"options has the name {name!r}: names are text, such as 'data.val_fraction'"
        )
    full = in_full(command, name)
    if any(in_full(command, other) == full for other, _ in line.flags):
        raise WrongUsage(f"{flag_names(command, full)} is set twice: as {name!r} in options, too")
    if (name in ALONE and name not in _SWITCHES) or name.endswith(".help"):
        raise WrongUsage(f"--{name} only prints: it is for the command line")
    if value is None and full in ("data.exclude", "data.merge"):
        value = []  # the text null is a name
    elif value is None and holds_names(full):
        return
    if name not in _SWITCHES:
        line.flags.append((name, _text(value, shown)))
    elif value:
        line.flags.append((name, None if value is True else _text(value, shown)))


def _text(value: Any, name: str) -> str:
    """Return a value as text of a command line."""
    if isinstance(value, str):
        return value
    try:
        return os.fsdecode(value) if isinstance(value, os.PathLike) else flow_yaml(value, _plain)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} cannot be written on a command line or in a config: {error}"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    raise TypeError(f"it holds a {type(value).__module__}.{type(value).__qualname__}")
