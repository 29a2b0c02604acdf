"""What the README shows exists."""

import re
import shlex
from inspect import signature

import pytest
from command_lines import own_options
from paths import ROOT

from finetune.cli import LIGHTNING, OWN
from finetune.commands import config_files
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.parser import valid_keys
from finetune.data.datamodule import ImageDataModule

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^finetune .+$", README, re.M)
TARGETS = re.findall(r"^make (\w+)", README, re.M)


def test_it_opens_with_the_two_commands():
    assert TARGETS == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in TARGETS)
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()


def options_of(command: str) -> set[str]:
    from unittest.mock import patch

    with patch.object(FinetuneCLI, "parse_arguments", side_effect=InterruptedError), pytest.raises(InterruptedError):
        cli = FinetuneCLI.__new__(FinetuneCLI)
        cli.__init__([command])  # type: ignore[misc]
    return set(valid_keys(cli._subcommand_parsers[command]))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_options(line):
    _, command, *rest = shlex.split(line, comments=True)
    assert command in {**LIGHTNING, **OWN}
    valid = options_of(command) if command in LIGHTNING else own_options(command)
    for option, value in zip(rest, [*rest[1:], ""], strict=True):
        if option.startswith("--"):
            name = option.removeprefix("--")
            assert name in valid or name.startswith("data."), option  # the data module's depend on its class
        if option == "--config":
            assert value in config_files.shipped()


def test_options_in_the_table_exist():
    valid = options_of("fit") | options_of("predict") | own_options("sheet") | own_options("by-hand")
    valid |= own_options("check")
    valid |= {f"data.{name}" for name in signature(ImageDataModule).parameters}
    shown = set(re.findall(r"--([a-z_.]+[a-z])", README)) - {"help"}
    assert shown - valid == set()


def test_files_that_it_names_exist():
    named = re.findall(r"`((?:tests|finetune)/[\w/]+\.py)`", README) + re.findall(r"\]\(((?!http)[^)]+)\)", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
