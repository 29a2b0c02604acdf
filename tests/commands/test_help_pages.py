"""The pages of `--help` are short, quick, and agree with the real parser."""

import json
import subprocess
import sys
from inspect import signature
from typing import Any

import pytest
import yaml
from command_lines import parse

from finetune.cli import LIGHTNING as LIGHTNING_COMMANDS
from finetune.cli import OWN, SECTIONS, _help, run_own
from finetune.commands.by_hand import by_hand
from finetune.commands.cache import cache
from finetune.commands.check import check
from finetune.commands.export import export
from finetune.commands.flag_checks import check_flags
from finetune.commands.help_pages import PAGES, help_page, options, page
from finetune.commands.options import OPTIONS
from finetune.commands.parity import parity
from finetune.commands.parsed_line import parse_line
from finetune.commands.review import review
from finetune.commands.serve import serve
from finetune.data.datamodule import ImageDataModule
from finetune.demo.demo import demo
from finetune.runs.predictions import FILES


@pytest.mark.parametrize("command", PAGES)
def test_it_is_one_screen_with_examples_that_are_understood(command):
    lines = page(command).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    examples = [line.split()[1:] for line in lines if line.startswith(f"  finetune {command}")]
    assert 2 <= len(examples) <= 3
    for _, *rest in examples:
        check_flags(command, parse_line(rest))


def test_the_list_of_commands_has_each_once():
    lines = _help().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    listed = [command for commands in SECTIONS.values() for command in commands]
    assert sorted(listed) == sorted([*LIGHTNING_COMMANDS, *OWN])


@pytest.mark.parametrize("command", sorted({*OWN, *LIGHTNING_COMMANDS} - PAGES.keys()))
def test_a_page_of_argparse_has_examples_and_no_empty_defaults(command, capsys):
    with pytest.raises(SystemExit):
        run_own(command, ["--help"])
    text = capsys.readouterr().out
    assert f"for example:\n  finetune {command}" in text
    assert "null" not in text and "None" not in text and "(required)" not in text


def test_which_command_lines_ask_for_it():
    assert help_page(["fit", "--help"]) == help_page(["fit", "photos", "-h"]) == page("fit")
    for line in (
        ["fit"],
        ["fit", "--help", "all"],
        ["fit", "--data.help"],
        ["fit", "--", "--help"],
        ["runs", "-h"],
    ):
        assert help_page(line) is None


# Runs command lines in one process; its last line says of each how it ended, and what was imported by then.
_LINES = """
import json, sys
import finetune
finetune.__all__
codes, imported = [None], []
def look():
    imported.append(sorted({"PIL", "numpy", "pytorch_lightning", "torch"} & set(sys.modules)))
look()
from finetune.cli import main
for line in json.loads(sys.argv[1]):
    try:
        main(line)
    except SystemExit as ended:
        codes.append(ended.code)
    look()
print()
print(json.dumps([codes, imported]))
"""
BEFORE_TORCH = {
    "--help": 0,
    "--version": 0,
    "fit --help": 0,
    "fit x --epoch 3": 2,
    "fit --config hotdg.yaml": 2,
    "check nowhere": 2,
    "cache": 0,
    "serve some.ckpt --port 0 --precision 32": 2,
}


@pytest.mark.slow
def test_neither_the_package_nor_help_nor_an_error_line_waits_for_torch(tmp_path):
    (tmp_path / "some.ckpt").touch()
    lines = json.dumps([line.split() for line in [*BEFORE_TORCH, "fit --data.root nowhere"]])
    command = [sys.executable, "-c", _LINES, lines]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    codes, imported = json.loads(done.stdout.splitlines()[-1])
    assert codes == [None, *BEFORE_TORCH.values(), 1]
    for line, names in zip(["import finetune", *BEFORE_TORCH], imported[:-1], strict=True):
        is_light = line.startswith(("import", "fit", "--"))
        assert not names if is_light else not {"pytorch_lightning", "torch"} & set(names), line
    assert "torch" in imported[-1]  # the control: a right command line
    errors = done.stderr.splitlines()
    assert len(errors) == 5 and all(line.startswith("finetune: error: ") for line in errors)
    assert "nowhere" in errors[2] and "--precision" in errors[3]


LIGHTNING = [command for command, page in PAGES.items() if not page.has_all]


def test_a_fit_s_has_the_twenty_options_that_people_use():
    assert 19 <= len(options("fit")) <= 24
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
    assert {option.full for option in options(command)} <= OPTIONS[command].keys()


def test_predict_reports_where_its_file_goes_unless_it_is_set():
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
    [
        ("export", export),
        ("serve", serve),
        ("check", check),
        ("review", review),
        ("demo", demo),
        ("by-hand", by_hand),
        ("parity", parity),
        ("cache", cache),
    ],
)
def test_the_defaults_of_our_own_commands(command, function):
    defaults = {
        name: parameter.default for name, parameter in signature(function).parameters.items()
    }
    for option in options(command):
        default = option.default or "" if option.value else "false"  # a switch has no value
        assert yaml.safe_load(default) == defaults[option.full]
