"""Writes `finetune/commands/options.json`: the options of the commands as the real parser has them.

`make options` runs it; `tests/promises/test_help.py` fails where the file differs from what it would write.
"""

import contextlib
import importlib
import inspect
import json
import types
from collections.abc import Iterator
from importlib.metadata import version
from inspect import signature
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

import torch
from jsonargparse import ArgumentParser, Namespace
from torchvision import models

from finetune.cli import LIGHTNING, OWN
from finetune.commands.benchmark import BenchmarkCLI
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.options import FILE, WORDS
from finetune.data.datamodule import ImageDataModule
from finetune.models.backbones import SMALL_NETWORKS

# The kind of an option's value: "number", "whole number", a list of choices, or None where the parser decides.
Kind = str | list[str] | None

# Options of the classes that `--model.optimizer` and `--model.scheduler` may be replaced by: only
# those of the default classes that people set. The parser decides on all others.
_OF_CLASSES = ("model.optimizer.", "model.scheduler.")
_COMMON_OF_CLASSES = (
    "model.optimizer.lr",
    "model.optimizer.weight_decay",
    "model.scheduler.warmup",
)
_OF_JSONARGPARSE = ("config", "help", "print_config")


def generated() -> dict[str, Any]:
    """Return the content of the file for the installed versions."""
    commands = {name: _lightning_options(name) for name in (*LIGHTNING, "benchmark")}
    first, *others = commands.values()
    shared = {
        name: kind
        for name, kind in first.items()
        if all(name in options and options[name] == kind for options in others)
    }
    own = {
        command: {name: kind for name, kind in options.items() if name not in shared}
        for command, options in commands.items()
    }
    own |= {name: _function_options(name) for name in WORDS if name not in commands}
    networks = {*SMALL_NETWORKS, *models.list_models(module=models)}
    return {
        "lightning": _minor("pytorch-lightning"),
        "torchvision": _minor("torchvision"),
        "backbones": sorted(name for name in networks if not name.startswith("squeezenet")),
        "optimizers": sorted(_optimizers()),
        "shared_by": list(commands),
        "shared": dict(sorted(shared.items())),
        "commands": {name: dict(sorted(options.items())) for name, options in own.items()},
    }


def text(content: dict[str, Any]) -> str:
    """Return the content as JSON, with one option a line."""
    return json.dumps(content, indent=1) + "\n"


def _minor(package: str) -> str:
    return ".".join(version(package).split(".")[:2])


def _optimizers() -> Iterator[str]:
    for name, kind in vars(torch.optim).items():
        is_optimizer = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
        if is_optimizer and kind is not torch.optim.Optimizer:
            yield name


def _lightning_options(command: str) -> dict[str, Kind]:
    """Return the options of fit, validate, test, predict or benchmark."""
    options: dict[str, Kind] = {}
    for action in lightning_parser(command)._actions:
        hint = getattr(action, "_typehint", None) or action.type
        for flag in action.option_strings:
            name = flag.removeprefix("--")
            if flag.startswith("--") and not name.endswith((".help", "+")):
                options[name] = kind_of(hint)
        options |= _options_of_default(action.dest, action.default)
    options |= _options_of_class("data", ImageDataModule)
    return {
        name: kind
        for name, kind in options.items()
        if not name.startswith(_OF_CLASSES) or name in _COMMON_OF_CLASSES
    }


def _options_of_default(name: str, default: Any) -> dict[str, Kind]:
    """Return the options of the class that an option names by default, if it names one."""
    class_path = default.get("class_path") if isinstance(default, (dict, Namespace)) else None
    if class_path is None:
        return {}
    module, _, kind = class_path.rpartition(".")
    return _options_of_class(name, getattr(importlib.import_module(module), kind))


def _options_of_class(group: str, kind: type) -> dict[str, Kind]:
    hints = _hints(kind.__init__)  # type: ignore[misc]
    return {f"{group}.{argument}": kind_of(hint) for argument, hint in hints.items()}


def lightning_parser(command: str) -> ArgumentParser:
    """Return the parser of fit, validate, test, predict or benchmark."""
    cli = unparsed(command)
    # LightningCLI has no public name for them
    return cli._subcommand_parsers["fit" if command == "benchmark" else command]  # noqa: SLF001


def unparsed(command: str) -> FinetuneCLI:
    """Return the command line interface of a command, which has its parsers and has parsed nothing."""
    kind = BenchmarkCLI if command == "benchmark" else FinetuneCLI
    cli = kind.__new__(kind)
    stop = patch.object(FinetuneCLI, "parse_arguments", side_effect=InterruptedError)
    with stop, contextlib.suppress(InterruptedError):
        cli.__init__([command])  # type: ignore[misc]
    return cli


def _function_options(command: str) -> dict[str, Kind]:
    """Return the options of a command that is a plain function."""
    module, _, name = OWN[command][0].partition(":")
    hints = _hints(getattr(importlib.import_module(module), name))
    options = {name: kind_of(hint) for name, hint in hints.items() if name != "folder"}
    return options | dict.fromkeys(_OF_JSONARGPARSE)


def _hints(function: Any) -> dict[str, Any]:
    hints = get_type_hints(function)
    return {name: hints.get(name) for name in signature(function).parameters if name != "self"}


def kind_of(hint: Any) -> Kind:
    """Return the kind of value that a type has: a number, a whole number, its choices, or None for any other."""
    parts = [part for part in _alternatives(hint) if part not in (type(None), torch.Tensor)]
    if parts and all(part is int for part in parts):
        return "whole number"
    if parts and all(part in (int, float) for part in parts):
        return "number"
    if parts and all(get_origin(part) is Literal for part in parts):
        return list(dict.fromkeys(str(value) for part in parts for value in get_args(part)))
    return None


def _alternatives(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [part for alternative in get_args(hint) for part in _alternatives(alternative)]
    return [hint]


if __name__ == "__main__":
    FILE.write_text(text(generated()), "utf-8")
