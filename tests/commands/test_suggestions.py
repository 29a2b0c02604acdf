"""Which option was meant, for flags as users of other tools type them."""

import pytest

from finetune.commands.options import OPTIONS, SYNONYMS, WORDS
from finetune.commands.suggestions import (
    class_names,
    nearest_option,
    unknown_option_message,
)

MEANT = {
    ("fit", "epcohs"): "trainer.max_epochs",
    ("fit", "trainer.epochs"): "trainer.max_epochs",
    ("fit", "max_epoch"): "trainer.max_epochs",
    ("fit", "learning-rate"): "model.optimizer.lr",
    ("fit", "model.lr"): "model.optimizer.lr",
    ("fit", "optimizer.lr"): "model.optimizer.lr",
    ("fit", "LR"): "model.optimizer.lr",
    ("fit", "opt"): "model.optimizer",
    ("fit", "wd"): "model.optimizer.weight_decay",
    ("fit", "imgsz"): "data.image_size",
    ("fit", "data.siez"): "data.image_size",
    ("fit", "eval_size"): "data.eval_image_size",
    ("fit", "j"): "data.num_workers",
    ("fit", "model"): "model",
    ("fit", "bakbone"): "model.backbone",
    ("fit", "weight"): "model.weights",
    ("fit", "model.freez"): "model.freeze",
    ("fit", "device"): "trainer.devices",
    ("fit", "seed_everythin"): "seed_everything",
    ("fit", "random_seed"): None,
    ("fit", "output-dir"): "trainer.default_root_dir",
    ("fit", "root"): "data.root",
    ("fit", "data.resiz"): "data.resize",
    ("fit", "checkpoint"): "ckpt_path",
    ("fit", "min_crop"): "data.min_crop",
    ("fit", "zzz"): None,
    ("predict", "image"): "data.predict",
    ("predict", "output_file"): "output",
    ("check", "img_size"): "image_size",
}


def test_what_is_typed():
    found = {
        (command, typed): nearest_option(typed, OPTIONS[command], WORDS[command])
        for command, typed in MEANT
    }
    assert found == MEANT


def test_keys_of_configs_know_no_short_words():
    keys = [
        "data.root",
        "model.freeze",
        "model.freeze_batch_norm",
        "model.weights",
        "trainer.max_epochs",
        "resume",
    ]
    meant = {
        "epochs": "trainer.max_epochs",
        "model.frezee": "model.freeze",
        "model.freeze_batchnorm": "model.freeze_batch_norm",
        "rot": "data.root",
        "weights": "model.weights",
        "model.max_epochs": "trainer.max_epochs",  # right name, wrong group
        "model.xyzzy": None,
    }
    assert {key: nearest_option(key, keys) for key in meant} == meant
    assert nearest_option("model.head_lr_multiplyer", OPTIONS["fit"]) == "model.head_lr_multiplier"


@pytest.mark.parametrize(
    ("command", "typed", "valid", "message"),
    [
        ("fit", "--epoch", None, "; did you mean --epochs (--trainer.max_epochs)?"),
        ("fit", "--top_k", None, ": --top_k is one of finetune predict"),
        ("runs", "--batch", ["batch_size"], "; did you mean --batch_size?"),
        ("runs", "--zzz", ["batch_size"], "; finetune runs --help has all of them"),
        ("fit", "--data.zzz", ["data.root", "data.resize"], "; those of the data are resize root"),
        (
            "serve",  # which has no options of the data
            "--data.zzz",
            None,
            "; finetune serve --help has those that people use, --help all has all of them",
        ),
        ("fit", "model.freez", None, "; did you mean 'model.freeze'?"),
    ],
)
def test_the_message_about_an_option_that_a_command_does_not_have(command, typed, valid, message):
    shown = typed if typed.startswith("-") else repr(typed)
    assert (
        unknown_option_message(command, typed, valid)
        == f"finetune {command} has no option {shown}{message}"
    )


def test_the_message_about_an_argument_of_a_class_names_no_command():
    reported = unknown_option_message("", "rot", ["root", "batch_size"])
    assert reported == "there is no option 'rot'; did you mean 'root'?"


@pytest.mark.parametrize(
    ("option", "there", "missing"),
    [
        ("model.optimizer", "SGD", "Tensor"),
        ("model.optimizer", "AdamW", "Optimizer"),
        ("model.scheduler", "OneCycleLR", "Counter"),  # which the module only imports
        ("trainer.callbacks", "EarlyStopping", "Trainer"),
    ],
)
def test_classes_that_an_option_names(option, there, missing):
    assert there in class_names(option) and missing not in class_names(option)


def test_classes_of_other_options_are_not_known():
    assert class_names("data") == []


def test_every_word_of_the_table_leads_to_an_option_that_exists():
    for option, words in SYNONYMS.items():
        assert [word for word in words if nearest_option(word, [option]) != option] == []
