"""The pages of `--help` are short, quick, and true to the real parser."""

import subprocess
import sys
from inspect import signature
from typing import Any

import pytest
import yaml
from command_lines import parse

from finetune.commands.config_files import shipped
from finetune.commands.export import export
from finetune.commands.given_arguments import taken_apart
from finetune.commands.help_pages import OWN_PAGES, help_page, options, page
from finetune.commands.known_flags import check_flags
from finetune.commands.option_names import OPTIONS
from finetune.commands.sheet import sheet
from finetune.data.datamodule import ImageDataModule

LIGHTNING = ("fit", "validate", "test", "predict")
ALL = (*LIGHTNING, *OWN_PAGES)


@pytest.mark.parametrize("command", ALL)
def test_it_is_one_screen_with_examples_that_are_understood(command):
    lines = page(command).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 115
    examples = [line.split()[1:] for line in lines if line.startswith(f"  finetune {command} ")]
    assert len(examples) == (3 if command in OWN_PAGES else 5)
    for _, *rest in examples:
        check_flags(command, taken_apart(rest))


def test_a_fit_s_has_the_twenty_options_that_people_use():
    assert 19 <= len(options("fit")) <= 22
    assert {"data.root", *(option.full for option in options("fit"))} >= {
        *("data.root", "data.batch_size", "data.image_size", "model.backbone", "model.weights", "model.freeze"),
        *("trainer.max_epochs", "model.optimizer.lr", "trainer.devices", "seed_everything", "resume"),
        "trainer.default_root_dir",
    }


@pytest.mark.parametrize("command", ALL)
def test_its_options_exist(command):
    assert {option.full for option in options(command)} <= OPTIONS[command]


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
    return parse(["fit", "--config", str(shipped()["image_folder.yaml"]), "--data.root", "x"])


@pytest.mark.parametrize("command", LIGHTNING)
def test_its_defaults_are_those_of_the_parser(command, settings):
    for option in options(command):
        if option.default is not None:
            assert yaml.safe_load(option.default) == found(settings, option.full), option


def test_control_another_default_would_be_noticed(settings):
    assert found(settings, "data.batch_size") == 32 != signature(ImageDataModule).parameters["batch_size"].default
    assert found(settings, "model.optimizer.lr") != 0.005


@pytest.mark.parametrize(("command", "function"), [("sheet", sheet), ("export", export)])
def test_the_defaults_of_our_own_commands(command, function):
    defaults = {name: parameter.default for name, parameter in signature(function).parameters.items()}
    for option in options(command):
        assert yaml.safe_load(option.default or "") == defaults[option.full]


def test_which_command_lines_ask_for_it():
    assert help_page(["fit", "--help"]) == help_page(["fit", "pictures", "-h"]) == page("fit")
    for line in (["fit"], ["fit", "--help", "all"], ["fit", "--data.help"], ["fit", "--", "--help"], ["check", "-h"]):
        assert help_page(line) is None


@pytest.mark.parametrize("line", [["fit", "--help"], ["fit", "x", "--epoch", "3"], ["fit", "--config", "hotdg.yaml"]])
def test_neither_help_nor_a_wrong_option_waits_for_torch(line, tmp_path):
    code = f"import sys; from finetune.cli import main\ntry: main({line!r})\n"
    code += "finally: print({'torch', 'numpy', 'pytorch_lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout.endswith("set()\n")
    assert (done.returncode, done.stderr.count("\n")) == ((0, 0) if "--help" in line else (2, 1))


def test_control_a_right_command_line_loads_torch(tmp_path):
    code = "import sys; from finetune.cli import main\ntry: main(['fit', '--data.root', 'nowhere'])\n"
    code += "finally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "True\n"
