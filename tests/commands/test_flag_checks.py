"""Checks before torch refuse only what the real parser refuses, and shorthands are expanded."""

from pathlib import Path

import pytest
import torch
from command_lines import parse
from option_list import lightning_parser

from finetune.commands import flag_checks
from finetune.commands.command_line import in_full_spelling
from finetune.commands.flag_checks import check_flags
from finetune.commands.options import OPTIMIZERS, OPTIONS
from finetune.commands.parsed_line import parse_line
from finetune.system.messages import WrongUsage

LEFT = [
    ["--model.optimizer.lrr", "3"],
    ["--model.optimizer.init_args.lr", "3"],
    ["--trainer.callbacks.init_args.patience=3"],
    ["--trainer.callbacks+=EarlyStopping"],
    ["--trainer.callbacks+", "EarlyStopping"],
    ["--trainer.logger.save_dir", "x"],
    ["--trainer.strategy.timeout", "x"],
    ["--trainer.callbacks.help", "EarlyStopping"],
    ["--model.class_mapping.hotdog", "x"],
    ["--model.scheduler.warmup", "0.2"],
    ["--data", "my.Data", "--data.zzz", "3"],
    ["--data.class_path=my.Data", "--data.zzz", "3"],
    ["--data.init_args.zzz", "3"],
    ["--data.dict_kwargs.zzz", "3"],
    ["--data.augmentations+", "x"],
    ["--config", "own.yaml", "--data.zzz", "3"],
    ["--config", "absent.yaml", "--data.zzz", "3"],
    ["--print_shtab=bash"],
    ["--print_config"],
    ["-h"],
    ["-c", "hotdog.yaml"],
    ["-chotdog.yaml"],
]


@pytest.mark.parametrize("rest", LEFT, ids=" ".join)
def test_what_a_class_decides_is_left_to_the_parser(rest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("data: {class_path: my.Data}\n")
    check_flags("fit", parse_line(rest))


# Three lines of options, which go together, for the parser takes its time.
ACCEPTED = [
    [
        ["--model.optimizer", "Adam", "--model.optimizer.betas", "[0.8, 0.9]"],
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/loss"],
        [
            "--trainer.logger",
            "pytorch_lightning.loggers.CSVLogger",
            "--trainer.logger.save_dir",
            "x",
        ],
        ["--model.scheduler", "finetune.WarmupCosine", "--model.scheduler.warmup", "0.2"],
        ["--data", "finetune.SampleData", "--data.root", "data/sample/source"],
        ["--trainer.max_steps=-1"],
        ["--model.class_mapping", '{"a": "b"}'],
    ],
    [
        ["-c", "x.yaml"],
        ["--model.optimizer.init_args.lr", "0.1"],
        [
            "--trainer.callbacks",
            '[{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}]',
        ],
        ["--data.init_args.batch_size", "3"],
    ],
    [
        ["-cx.yaml"],
        ["--data.class_path", "finetune.FashionMNIST"],
        ["--trainer", '{"max_epochs": 3}'],
    ],
]


@pytest.mark.parametrize("line", ACCEPTED)
def test_what_the_parser_accepts_passes(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("seed_everything: 3\n")
    parse(["fit", *(word for words in line for word in words)])
    for words in line:
        check_flags("fit", parse_line(words))


def test_values_of_a_data_class_of_one_s_own_are_left_to_it():
    check_flags("fit", parse_line(["--data.resize", "squosh", "--data", "my.Data"]))


def test_no_value_that_the_parser_accepts_is_refused():
    kinds = {name: kind for name, kind in OPTIONS["fit"].items() if kind}
    choices = {name: kind for name, kind in kinds.items() if isinstance(kind, list)}
    # All options stand in one line, which costs the parser no more than one: the i-th choice of each.
    for i in range(max(map(len, choices.values()))):
        line = [f"--{name}={valid[min(i, len(valid) - 1)]}" for name, valid in choices.items()]
        if i == 0:
            line += [f"--{name}=1" for name, kind in kinds.items() if kind == "number"]
        lightning_parser("fit").parse_args(line)
        check_flags("fit", parse_line(line))
    for name in OPTIMIZERS:
        assert issubclass(getattr(torch.optim, name), torch.optim.Optimizer)


OTHERS = [
    ["--trainer.new", "3"],
    ["--trainer.max_epoch", "3"],
    ["--epochs", "ten"],
    ["--trainer.precision", "fp17"],
    ["--trainer.max_epochs"],
]


@pytest.mark.parametrize("rest", OTHERS, ids=" ".join)
def test_with_another_lightning_options_of_the_trainer_are_left_to_the_parser(rest, monkeypatch):
    with pytest.raises(WrongUsage):
        check_flags("fit", parse_line(rest))
    monkeypatch.setattr(flag_checks, "version", lambda name: "2.7.0")
    check_flags("fit", parse_line(rest))


def test_with_another_torchvision_names_of_networks_are_left_to_the_parser(monkeypatch):
    with pytest.raises(WrongUsage, match="cannot be 'resnet19'"):
        check_flags("fit", parse_line(["--backbone", "resnet19"]))
    monkeypatch.setattr(flag_checks, "version", lambda name: "0.99.0")
    check_flags("fit", parse_line(["--backbone", "resnet19"]))


SHORTHANDS = [
    (["--optimizer", "adamw"], ["--model.optimizer", "AdamW"]),
    (["--model.optimizer=SGD"], ["--model.optimizer", "SGD"]),
    (["--optimizer", "mine.Own"], ["--model.optimizer", "mine.Own"]),
    (["--backbone", "ResNet50"], ["--model.backbone", "resnet50"]),
    (["--backbone", "convnext_tiny"], ["--model.backbone", "convnext_tiny"]),
    (["--logger", "wandb"], ["--trainer.logger", "finetune.WandbLogger"]),
    (
        ["--trainer.logger", "tensorboard,mlflow"],
        ["--trainer.logger", '["finetune.TensorBoardLogger", "finetune.MLFlowLogger"]'],
    ),
    (["--logger", "mine.Logger"], ["--trainer.logger", "mine.Logger"]),
    (["--logger", "false"], ["--trainer.logger", "false"]),
]


@pytest.mark.parametrize(("typed", "full"), SHORTHANDS)
def test_what_is_plainly_meant_is_done(tmp_path, monkeypatch, typed, full):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    arguments = in_full_spelling(["fit", *typed, "photos"])
    assert arguments[1:] == [*full, "--data.root", "photos"]
    assert in_full_spelling(arguments) == arguments


@pytest.mark.parametrize(
    "right", [["--model", "{backbone: x}"], ["--model", "m.yaml"], ["--data", "ImageFolderData"]]
)
def test_tables_files_and_classes_are_left_to_the_parser(tmp_path, monkeypatch, right):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text("backbone: resnet18")
    (tmp_path / "photos").mkdir()
    assert in_full_spelling(["fit", *right, "photos"])
