"""The frozen names are those of the real parser."""

from importlib.metadata import version
from inspect import signature
from typing import get_args
from unittest.mock import patch

import pytest
from command_lines import own_options
from pytorch_lightning.cli import LightningArgumentParser
from torchvision import models

from finetune.commands.benchmark import BenchmarkCLI
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.lightning_flags import add_flags
from finetune.commands.option_names import BACKBONES, CHOICES, DATA, LIGHTNING, OPTIONS, TORCHVISION
from finetune.commands.parser import valid_keys
from finetune.data.datamodule import ImageDataModule
from finetune.models.backbones import OWN
from finetune.training.classifier import Classifier

# Of classes that may be others.
_PATHS = {"optimizer.lr", "optimizer.momentum", "optimizer.weight_decay", "scheduler.warmup"}


def real(command: str) -> set[str]:
    kind = BenchmarkCLI if command == "benchmark" else FinetuneCLI
    with (
        patch.object(FinetuneCLI, "parse_arguments", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        cli = kind.__new__(kind)
        cli.__init__([command])  # type: ignore[misc]
    keys = {
        key.rstrip("+")
        for key in valid_keys(cli._subcommand_parsers["fit" if kind is BenchmarkCLI else command])
    }
    keys = {key for key in keys if not key.endswith(".help") and key not in ("h", "c")}
    of_classes = ("model.optimizer.", "model.scheduler.")
    return {
        key
        for key in keys
        if not key.startswith(of_classes) or key.removeprefix("model.") in _PATHS
    }


@pytest.mark.parametrize("command", ["fit", "benchmark", "validate", "test", "predict"])
def test_of_lightning_s_commands(command):
    keys = real(command)
    lacking, more = sorted(keys - OPTIONS[command]), sorted(OPTIONS[command] - keys)
    assert not lacking and not more, f"put into option_names.py: {lacking}; take out: {more}"


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_flags_beside_lightning_s_have_words_in_the_help(command):
    parser = LightningArgumentParser()
    parser.add_argument("--model.class_names", help="of a checkpoint")
    add_flags(parser, command)
    added = {action.dest: action.help for action in parser._actions}
    assert added.keys() - {"model.class_names"} <= OPTIONS[command] and all(added.values())


@pytest.mark.parametrize("command", ["sheet", "export", "check", "serve"])
def test_of_our_own(command):
    by_jsonargparse = {"config", "help", "print_config"}
    assert OPTIONS[command] - by_jsonargparse == own_options(command) - {"folder"}


def test_networks_are_those_of_this_version_of_torchvision():
    real = {*OWN, *models.list_models(module=models)}
    assert {*BACKBONES.split()} == {name for name in real if not name.startswith("squeezenet")}
    assert version("torchvision").startswith(f"{TORCHVISION}.")


def test_of_the_data_and_of_this_version_of_lightning():
    assert set(DATA.split()) == set(signature(ImageDataModule).parameters)
    assert version("pytorch-lightning").startswith(f"{LIGHTNING}.")


def test_few_values_are_those_of_the_signatures():
    arguments = {
        "model": signature(Classifier).parameters,
        "data": signature(ImageDataModule).parameters,
    }
    for option, values in CHOICES.items():
        group, _, name = option.rpartition(".")
        if group:
            assert set(values) == set(get_args(arguments[group][name].annotation)), option
