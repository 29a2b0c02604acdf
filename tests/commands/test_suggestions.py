"""Which option was meant, for flags as people coming from elsewhere type them."""

import pytest

from finetune.commands.option_names import OPTIONS
from finetune.commands.short_words import WORDS
from finetune.commands.suggestions import class_names, nearest_flag, nearest_key

MEANT = {
    "epoch": "trainer.max_epochs",
    "epcohs": "trainer.max_epochs",
    "num-epochs": "trainer.max_epochs",
    "trainer.epochs": "trainer.max_epochs",
    "max_epoch": "trainer.max_epochs",
    "learning-rate": "model.optimizer.lr",
    "learning_rate": "model.optimizer.lr",
    "model.lr": "model.optimizer.lr",
    "optimizer.lr": "model.optimizer.lr",
    "lr0": "model.optimizer.lr",
    "LR": "model.optimizer.lr",
    "optimiser": "model.optimizer",
    "opt": "model.optimizer",
    "wd": "model.optimizer.weight_decay",
    "batch-size": "data.batch_size",
    "batchsize": "data.batch_size",
    "bs": "data.batch_size",
    "imgsz": "data.image_size",
    "image-size": "data.image_size",
    "resolution": "data.image_size",
    "eval_size": "data.eval_image_size",
    "data.size_schedule": "data.image_size_schedule",
    "num_workers": "data.num_workers",
    "j": "data.num_workers",
    "arch": "model.backbone",
    "model": "model",
    "bakbone": "model.backbone",
    "pretrained": "model.weights",
    "weight": "model.weights",
    "freez": "model.freeze",
    "model.freez": "model.freeze",
    "gpus": "trainer.devices",
    "device": "trainer.devices",
    "fp16": "trainer.precision",
    "random_seed": None,
    "seed_everythin": "seed_everything",
    "sead": "seed_everything",
    "output-dir": "trainer.default_root_dir",
    "out_dir": "trainer.default_root_dir",
    "root": "data.root",
    "data.rot": "data.root",
    "data.siez": "data.image_size",
    "trainer.epohcs": "trainer.max_epochs",
    "data.resiz": "data.resize",
    "dataset": "data.root",
    "checkpoint": "ckpt_path",
    "resme": "resume",
    "val-fraction": "data.val_fraction",
    "min_crop": "data.min_crop",
    "tresholds": "threshold",
    "zzz": None,
}


@pytest.mark.parametrize("typed", MEANT)
def test_what_is_typed_for_a_fit(typed):
    assert nearest_flag(typed, WORDS["fit"], OPTIONS["fit"]) == MEANT[typed]


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("predict", "topk", "top_k"),
        ("predict", "image", "data.predict"),
        ("predict", "output_file", "output"),
        ("predict", "picture", "data.predict"),
        ("sheet", "images", "pictures"),
        ("sheet", "data.predict", "pictures"),
        ("check", "img_size", "image_size"),
        ("test", "ckpt", "ckpt_path"),
    ],
)
def test_what_is_typed_for_others(command, typed, meant):
    assert nearest_flag(typed, WORDS[command], OPTIONS[command]) == meant


def test_keys_of_configs_know_no_short_words():
    assert nearest_key("epochs", sorted(OPTIONS["fit"])) == "trainer.max_epochs"
    assert nearest_key("model.head_lr_multiplyer", sorted(OPTIONS["fit"])) == "model.head_lr_multiplier"


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
