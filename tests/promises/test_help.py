"""Help pages: short, quick, and as the parser has it. The files that `make options` writes."""

import json
import subprocess
import sys
from importlib import import_module
from inspect import signature
from typing import Any

import pytest
import reference_page
import yaml
from option_list import generated, text
from pytorch_lightning.cli import LightningArgumentParser

from finetune.cli import LIGHTNING, OWN, SECTIONS, main
from finetune.commands.flag_checks import check_flags
from finetune.commands.help_pages import PAGES, options
from finetune.commands.lightning_flags import add_flags
from finetune.commands.options import FILE, OPTIONS, POSITIONS, SYNONYMS, TABLE, WORDS
from finetune.commands.parsed_line import parse_line
from finetune.data.datamodule import ImageDataModule

COMMANDS = sorted({*LIGHTNING, *OWN})


@pytest.fixture
def shown(capsys):
    """The help that a command line asks for, with code 0."""

    def page(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        return capsys.readouterr().out

    return page


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_one_screen_with_examples_that_are_understood(command, shown):
    page = shown(command, "--help")
    lines = page.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= (80 if command in PAGES else 120)
    assert page == shown(command, "-h") and "for example:" in lines
    assert command in PAGES or not {"null", "None"} & {*page.split()}
    examples = [line.split()[1:] for line in lines if line.startswith(f"  finetune {command}")]
    assert 1 <= len(examples) <= 3
    for _, *rest in examples if command in PAGES else []:
        check_flags(command, parse_line(rest))


def test_the_list_of_commands_has_each_once(shown):
    lines = shown("--help").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    listed = [command for commands in SECTIONS.values() for command in commands]
    assert sorted(listed) == COMMANDS


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


def found(settings: Any, full: str) -> Any:
    """Return the value of a setting; the default of a data module where a run has none."""
    if full.startswith("data."):
        name = full.removeprefix("data.")
        given = settings["data"].get("init_args", {})
        return given.get(name, signature(ImageDataModule).parameters[name].default)
    if full == "model.optimizer":
        return settings["model"]["optimizer"]["class_path"].rpartition(".")[2]
    table = settings
    for part in full.replace("optimizer.", "optimizer.init_args.").split("."):
        table = table[part]
    return table


def defaults_of(function: Any) -> dict[str, Any]:
    return {name: each.default for name, each in signature(function).parameters.items()}


def test_defaults_in_help_are_those_of_the_commands(shown):
    settings = yaml.safe_load(shown("fit", "--data.root", ".", "--print_config"))
    others = yaml.safe_load(shown("fit", "--config", "fashion_mnist_lenet.yaml", "--print_config"))
    num_other = 0  # of another config: the control
    for command in LIGHTNING:
        for option in options(command):
            if option.default is not None:
                value = yaml.safe_load(option.default)
                assert value == found(settings, option.full), (command, option)
                num_other += value != found(others, option.full)
    assert num_other > 3
    for command in OWN.keys() & PAGES.keys() - {"benchmark"}:
        module, _, name = OWN[command][0].partition(":")
        defaults = defaults_of(getattr(import_module(module), name))
        for option in options(command):
            default = option.default or "" if option.value else "false"  # a switch has no value
            assert yaml.safe_load(default) == defaults[option.full], (command, option)


def test_the_files_of_make_options_are_as_it_would_write_them():
    """Another version of Lightning or torchvision, or a changed signature, fails here."""
    assert FILE.read_text("utf-8") == text(generated()), "run `make options`, and read the diff"
    assert reference_page.PAGE.read_text("utf-8") == reference_page.page(), "run `make options`"


def test_the_table_of_options_has_options_that_exist_each_once():
    for command, known in OPTIONS.items():
        names = [option.full for option in TABLE if command in option.commands]
        assert set(names) - {"folder"} <= known.keys() and len(names) == len(set(names)), command
    for command, words in WORDS.items():
        assert set(words.values()) <= OPTIONS[command].keys(), command
        assert not set(words) & OPTIONS[command].keys(), command
        assert set(POSITIONS[command]) - {"folder"} <= OPTIONS[command].keys()
    for command in LIGHTNING:  # what is next to Lightning's options has words in the help
        parser = LightningArgumentParser()
        parser.add_argument("--model.class_names", help="of a checkpoint")
        add_flags(parser, command)
        helps = {action.dest: action.help for action in parser._actions}
        assert helps.keys() <= OPTIONS[command].keys() | {"model.class_names"} and all(
            helps.values()
        )


def test_words_of_other_tools_are_answered_with_the_option(capsys):
    for full, words in SYNONYMS.items():
        if full not in OPTIONS["fit"]:
            continue
        of_fit = {word for word, name in WORDS["fit"].items() if name == full} | {full}
        for word in words:
            with pytest.raises(SystemExit):
                main(["fit", "photos", f"--{word}", "x"])
            error = capsys.readouterr().err
            is_option = word in OPTIONS["fit"].keys() | WORDS["fit"].keys()
            assert is_option or any(f"--{each}" in error for each in of_fit), (word, error)
