"""Read once what libraries read anew for each parser and each Trainer.

jsonargparse reads the source of a class for each parser of its arguments, and goes through all arguments for each that
it looks for; Lightning reads the entry points of all installed packages for each Trainer. A program does so once or
twice, the tests a thousand times.
"""

import importlib
import sys
from collections.abc import Callable
from copy import copy
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from jsonargparse import _core, _signatures, _subcommands
from lightning_fabric.utilities import registry


def remember_parameters() -> None:
    """Let the parsers of this process share the parameters of a class."""
    read = _signatures.get_signature_parameters
    known: dict[tuple[Callable[..., Any], str | None], list[Any]] = {}

    def parameters(
        function_or_class: Callable[..., Any], method: str | None = None, logger: Any = True
    ) -> list[Any]:
        key = (function_or_class, method)
        if key not in known:
            known[key] = read(function_or_class, method, logger=logger)
        return [copy(parameter) for parameter in known[key]]  # a parser changes them

    patch.object(_signatures, "get_signature_parameters", parameters).start()


def find_arguments_quickly() -> None:
    """Let parsers sort their arguments out by name before they ask for the class of each, with the same outcome."""
    find = _subcommands.find_action_and_subcommand

    def find_by_name(parser: Any, dest: str, exclude: Any = None) -> Any:
        option = f"--{dest}"
        actions = [
            action
            for action in parser._actions
            if action.dest == dest
            or option in action.option_strings
            or isinstance(action, _subcommands.ActionSubCommands)
        ]
        return find(SimpleNamespace(_actions=actions), dest, exclude)

    for module in (_subcommands, _core):
        patch.object(module, find.__name__, find_by_name).start()


def remember_entry_points() -> None:
    """Let the Trainers of this process share the entry points of the installed packages."""
    patch.object(registry, "entry_points", cache(registry.entry_points)).start()


def import_timm() -> None:
    """Import timm without wandb, which takes longer to import than the rest of timm, and is not needed here."""
    # not by `patch.dict`, which would remove the modules that are imported meanwhile
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("timm")
    finally:
        del sys.modules["wandb"]
