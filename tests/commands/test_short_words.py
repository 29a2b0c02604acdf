"""The short words are frozen: what people have typed goes on meaning the same."""

import pytest
from command_lines import parse

from finetune.commands.command_line import in_full_spelling
from finetune.commands.option_names import OPTIONS
from finetune.commands.short_words import POSITIONS, WORDS, both, in_full, with_options, word_for

FROZEN = {
    "fit": "backbone batch devices epochs freeze lr members optimizer out precision seed size weights workers",
    "benchmark": "backbone batch epochs freeze lr members optimizer out precision seed size weights workers",
    "validate": "batch devices out precision workers",
    "test": "batch devices out precision workers",
    "predict": "batch devices out pictures precision workers",
    "sheet": "out",
    "export": "out",
    "serve": "",
    "check": "out size",
}


def test_no_word_comes_or_goes_by_accident():
    assert {command: " ".join(sorted(words)) for command, words in WORDS.items()} == FROZEN


def test_words_stand_for_options_that_exist_and_hide_none():
    for command, words in WORDS.items():
        assert set(words.values()) <= OPTIONS[command]
        assert not set(words) & OPTIONS[command], command
        assert len(set(words.values())) == len(words)
        assert set(POSITIONS[command]) - {"folder"} <= OPTIONS[command]


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
        "devices": "2",
    },
    **{"precision": "bf16-mixed", "seed": "5", "out": "elsewhere"},
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


def test_messages_have_both():
    assert both("fit", "trainer.max_epochs") == "--epochs (--trainer.max_epochs)"
    assert both("fit", "data.root") == "finetune fit FOLDER (--data.root)"
    assert both("fit", "data.min_crop") == "--data.min_crop"
    assert both("predict", "output") == "--out (--output)"
    assert (
        in_full("fit", "epochs") == "trainer.max_epochs" and in_full("sheet", "epochs") == "epochs"
    )
    assert word_for("model.freeze") == "freeze" and word_for("data.min_crop") is None


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        ("fit", "batch_size must be at least 1", "--batch (--data.batch_size) must be at least 1"),
        (
            "fit",
            "nothing: trainer.max_epochs is 0",
            "nothing: --epochs (--trainer.max_epochs) is 0",
        ),
        ("fit", "layer_decay 2, model.freeze", "--model.layer_decay 2, --freeze (--model.freeze)"),
        ("fit", "--data.image_size 3", "--data.image_size 3"),
        (
            "fit",
            "a/batch_size is no folder, nor is 'batch_size'",
            "a/batch_size is no folder, nor is 'batch_size'",
        ),
        (
            "fit",
            "batch_size.txt, my_batch_size, no_option",
            "batch_size.txt, my_batch_size, no_option",
        ),
        ("sheet", "batch_size must be", "batch_size must be"),
    ],
)
def test_arguments_of_python_in_a_message_are_written_as_options(command, message, expected):
    assert with_options(command, message) == expected
    assert with_options(command, expected) == expected
