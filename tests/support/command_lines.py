"""Command lines that are parsed and not run."""

import importlib
import os
from inspect import signature
from typing import Any
from unittest.mock import patch

import pytest

from finetune.cli import OWN
from finetune.commands import command_line
from finetune.commands.lightning_cli import FinetuneCLI


class ParseOnly(FinetuneCLI):
    """The command line up to the point where files would be read and made."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class Parsed(Exception):
    """Everything was parsed, and nothing done yet."""


def parse(arguments: list[str]) -> Any:
    """Return the settings that the real parser makes of `finetune …`."""
    found: list[Any] = []

    def stop(cli: FinetuneCLI) -> None:
        found.append(cli.config[cli.subcommand])
        raise Parsed

    patched = patch.object(FinetuneCLI, "before_instantiate_classes", stop)
    with patch.dict(os.environ), patched, pytest.raises(Parsed):
        FinetuneCLI(arguments)
    return found[0]


def parse_typed(arguments: list[str]) -> Any:
    """Return the settings of `finetune …` as a person types it, whether or not its folder is here."""
    with patch.object(command_line, "_check_folder"):
        return parse(command_line.in_full_spelling(arguments))


def own_options(command: str) -> set[str]:
    module, _, name = OWN[command][0].partition(":")
    return set(signature(getattr(importlib.import_module(module), name)).parameters)
