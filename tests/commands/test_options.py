"""The table of options and the file of all options agree with the parser; short words are frozen."""

import json
from typing import Literal

import pytest
import reference_page
import torch
from command_lines import parse
from option_list import generated, kind_of, text
from pytorch_lightning.cli import LightningArgumentParser

from finetune.commands.command_line import in_full_spelling
from finetune.commands.lightning_flags import add_flags
from finetune.commands.options import (
    FILE,
    OPTIONS,
    POSITIONS,
    SYNONYMS,
    TABLE,
    WORDS,
)


def test_words_stand_for_options_that_exist_and_hide_none():
    for command, words in WORDS.items():
        assert set(words.values()) <= OPTIONS[command].keys()
        assert not set(words) & OPTIONS[command].keys(), command
        assert len(set(words.values())) == len(words)
        assert set(POSITIONS[command]) - {"folder"} <= OPTIONS[command].keys()


VALUES = {
    **{
        "epochs": "3",
        "lr": "0.02",
        "optimizer": "AdamW",
        "size": "64",
        "batch": "7",
        "workers": "2",
    },
    **{
        "backbone": "resnet50",
        "weights": "null",
        "freeze": "layer2",
        "members": "3",
        "class_weights": "{blue: 2}",
        "devices": "2",
    },
    **{
        "precision": "bf16-mixed",
        "seed": "5",
        "out": "elsewhere",
        "logger": "finetune.MLFlowLogger",
    },
}


@pytest.mark.slow
def test_both_spellings_are_one_setting(colours):
    assert VALUES.keys() == WORDS["fit"].keys()
    short = [part for word, value in VALUES.items() for part in (f"--{word}", value)]
    full = [part for word, value in VALUES.items() for part in (f"--{WORDS['fit'][word]}", value)]
    line = ["fit", "--config", "image_folder.yaml", "--data.root", str(colours)]
    found = [
        parse(in_full_spelling(["fit", str(colours), *short])),
        parse([*line, *full]),
        parse(line),
    ]
    settings, expected, without = (each.as_dict() for each in found)
    for each in (settings, expected, without):
        each.pop("config")
    assert settings == expected
    for name in WORDS["fit"].values():  # each word does something
        key = name.replace("optimizer.", "optimizer.init_args.").replace("data.", "data.init_args.")
        assert found[0][key] != found[2][key], name


def test_the_file_generated_again_is_the_same():
    """Another version of Lightning or torchvision, or a changed signature, fails here."""
    assert FILE.read_text("utf-8") == text(generated()), (
        "run `make options`, and read the difference"
    )


def test_the_page_of_all_options_is_as_it_would_be_generated():
    assert reference_page.PAGE.read_text("utf-8") == reference_page.page(), "run `make options`"


def test_control_a_changed_option_changes_the_file():
    content = json.loads(FILE.read_text("utf-8"))
    del content["shared"]["trainer.max_epochs"]
    assert FILE.read_text("utf-8") != text(content)


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (int, "whole number"),
        (int | None, "whole number"),
        (int | float | None, "number"),
        (float | torch.Tensor, "number"),
        (int | bool, None),
        (int | str, None),
        (Literal["a", "b"] | None, ["a", "b"]),
        (Literal[16] | Literal["16", "b"], ["16", "b"]),
        (int | Literal["auto"], None),
        (None, None),
    ],
)
def test_the_kind_of_value_that_a_type_has(hint, kind):
    assert kind_of(hint) == kind


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_flags_next_to_lightning_s_have_words_in_the_help(command):
    parser = LightningArgumentParser()
    parser.add_argument("--model.class_names", help="of a checkpoint")
    add_flags(parser, command)
    added = {action.dest: action.help for action in parser._actions}
    assert added.keys() - {"model.class_names"} <= OPTIONS[command].keys() and all(added.values())


def test_the_table_has_options_that_exist_each_once_for_a_command():
    for command, options in OPTIONS.items():
        names = [option.full for option in TABLE if command in option.commands]
        assert set(names) - {"folder"} <= options.keys()
        assert len(names) == len(set(names)), command


def test_other_tools_words_are_of_options_that_exist():
    assert SYNONYMS.keys() <= set().union(*OPTIONS.values())
