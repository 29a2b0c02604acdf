"""What the pages of `--help` say is true: options and defaults are those of the real parser."""

from inspect import signature
from typing import Any

import pytest
import yaml
from command_lines import parse

from finetune.commands.check import check
from finetune.commands.export import export
from finetune.commands.help_pages import options
from finetune.commands.help_texts import OWN_PAGES, PAGES
from finetune.commands.option_names import OPTIONS
from finetune.commands.serve import serve
from finetune.commands.sheet import sheet
from finetune.data.datamodule import ImageDataModule
from finetune.runs.predictions import FILES

LIGHTNING = [command for command in PAGES if command not in OWN_PAGES]


def test_a_fit_s_has_the_twenty_options_that_people_use():
    assert 19 <= len(options("fit")) <= 23
    assert {"data.root", *(option.full for option in options("fit"))} >= {
        *(
            "data.root",
            "data.batch_size",
            "data.image_size",
            "model.backbone",
            "model.weights",
            "model.freeze",
        ),
        *(
            "trainer.max_epochs",
            "model.optimizer.lr",
            "trainer.devices",
            "seed_everything",
            "resume",
        ),
        "trainer.default_root_dir",
    }


@pytest.mark.parametrize("command", PAGES)
def test_its_options_exist(command):
    assert {option.full for option in options(command)} <= OPTIONS[command]


def test_predict_s_says_where_its_file_goes_unless_told():
    """PredictionWriter writes into the run of the command, not into that of the checkpoint."""
    (output,) = [option for option in options("predict") if option.full == "output"]
    (out,) = [option for option in options("predict") if option.full == "trainer.default_root_dir"]
    assert f"{out.default}/predict/version_N/{FILES['predict']}" in output.text


def found(settings: Any, full: str) -> Any:
    if full.startswith("data."):
        given = settings.data.init_args.as_dict() if "init_args" in settings.data else {}
        name = full.removeprefix("data.")
        return given.get(name, signature(ImageDataModule).parameters[name].default)
    if full == "model.optimizer":
        return settings.model.optimizer.class_path.rpartition(".")[2]
    return settings["model.optimizer.init_args.lr" if full == "model.optimizer.lr" else full]


@pytest.fixture(scope="module")
def settings() -> Any:
    """What `finetune fit FOLDER` comes to."""
    return parse(["fit", "--data.root", "x"])


@pytest.mark.parametrize("command", LIGHTNING)
def test_its_defaults_are_those_of_the_parser(command, settings):
    for option in options(command):
        if option.default is not None and option.full != "repeats":
            assert yaml.safe_load(option.default) == found(settings, option.full), option


def test_the_default_of_benchmark_s_own():
    assert [option.default for option in options("benchmark") if option.full == "repeats"] == ["5"]


def test_control_another_default_would_be_noticed():
    settings = parse(["fit", "--config", "fashion_mnist_lenet.yaml"])
    assert (
        found(settings, "data.batch_size")
        == 256
        != signature(ImageDataModule).parameters["batch_size"].default
    )
    assert found(settings, "model.optimizer.lr") != 0.03


@pytest.mark.parametrize(
    ("command", "function"),
    [("sheet", sheet), ("export", export), ("serve", serve), ("check", check)],
)
def test_the_defaults_of_our_own_commands(command, function):
    defaults = {
        name: parameter.default for name, parameter in signature(function).parameters.items()
    }
    for option in options(command):
        assert yaml.safe_load(option.default or "") == defaults[option.full]
