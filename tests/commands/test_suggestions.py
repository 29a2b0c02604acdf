"""Which option was meant, for flags as users of other tools type them."""

import pytest

from finetune.commands.options import OPTIONS, SYNONYMS, WORDS
from finetune.commands.suggestions import (
    class_names,
    nearest_option,
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
