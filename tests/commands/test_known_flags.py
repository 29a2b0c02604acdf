"""The first look at flags refuses only what the real parser refuses, and says what was meant, in both spellings."""

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from command_lines import parse

from finetune.commands import known_flags
from finetune.commands.given_arguments import taken_apart
from finetune.commands.known_flags import check_flags
from finetune.commands.lightning_cli import FinetuneCLI
from finetune.commands.option_names import CHOICES, NUMBERS, OPTIMIZERS
from finetune.data.datamodule import ImageDataModule
from finetune.system.messages import WrongUsage
from finetune.training.classifier import Classifier

REFUSED = {
    ("fit", "--epoch", "3"): "--epoch; did you mean --epochs (--trainer.max_epochs)?",
    ("fit", "-lr", "3"): "-lr; did you mean --lr (--model.optimizer.lr)?",
    (
        "fit",
        "--trainer",
        "{}",
        "--trainer.epohcs",
        "3",
    ): "did you mean --epochs (--trainer.max_epochs)?",
    ("fit", "--data.rot", "x"): "did you mean finetune fit FOLDER (--data.root)?",
    (
        "fit",
        "--config",
        "hotdog.yaml",
        "--data.siez",
        "3",
    ): "did you mean --size (--data.image_size)?",
    ("fit", "--data.zzz", "x"): "those of the data are augmentations batch_size",
    ("fit", "--zzz"): "finetune fit --help has those that people use",
    ("fit", "--report.x", "3"): "no option --report.x",
    ("fit", "--top_k", "3"): "--top_k is one of finetune predict",
    ("test", "--epochs", "3"): "--epochs (--trainer.max_epochs) is one of finetune fit",
    ("predict", "--topk", "3"): "did you mean --top_k?",
}


@pytest.mark.parametrize("line", REFUSED, ids=" ".join)
def test_what_is_no_option_is_told_with_what_was_meant_and_the_parser_refuses_it_too(
    line, monkeypatch
):
    command, *rest = line
    with pytest.raises(WrongUsage) as caught:
        check_flags(command, taken_apart(rest))
    assert str(caught.value).startswith(f"finetune {command} has no option --") or line[1] == "-lr"
    assert REFUSED[line] in str(caught.value)
    if command == "fit":  # others would read a checkpoint first
        with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
            FinetuneCLI(list(line))
        assert re.search(rf"no option|another command|{line[1][2:8]}", err.getvalue())


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
    ["--trust_modules", "my", "--data.zzz", "3"],
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
    check_flags("test" if "--trust_modules" in rest else "fit", taken_apart(rest))


ACCEPTED = [
    ["--model.optimizer", "Adam", "--model.optimizer.betas", "[0.8, 0.9]"],
    ["--model.optimizer.init_args.lr", "0.1"],
    ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/loss"],
    [
        "--trainer.callbacks",
        '[{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}]',
    ],
    ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "x"],
    ["--model.scheduler", "finetune.WarmupCosine", "--model.scheduler.warmup", "0.2"],
    ["--data", "finetune.SampleData", "--data.root", "data/sample/source"],
    ["--data.init_args.batch_size", "3"],
    ["--data.class_path", "finetune.FashionMNIST"],
    ["--trainer", '{"max_epochs": 3}'],
    ["--trainer.max_steps=-1"],
    ["--model.class_mapping", '{"a": "b"}'],
    ["-c", "x.yaml"],
    ["-cx.yaml"],
]


@pytest.mark.parametrize("rest", ACCEPTED, ids=" ".join)
def test_what_the_parser_accepts_passes(rest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("seed_everything: 3\n")
    parse(["fit", *rest])
    check_flags("fit", taken_apart(rest))


def test_a_flag_without_its_value():
    with pytest.raises(WrongUsage, match=r"^--epochs \(--trainer.max_epochs\) needs a value$"):
        check_flags("fit", taken_apart(["--epochs", "--lr", "3"]))
    check_flags("fit", taken_apart(["--resume", "--epochs", "3"]))


VALUES = {
    (
        "--trainer.max_epochs",
        "ten",
    ): "--epochs (--trainer.max_epochs) takes a number, such as 3 or 0.01, not 'ten'",
    (
        "--model.optimizer.lr",
        "0,01",
    ): "--lr (--model.optimizer.lr) takes a number, such as 3 or 0.01, not '0,01'",
    ("--data.resize", "squosh"): "--data.resize can't be 'squosh'; did you mean 'squash'?",
    ("--data.on_bad_image", "zzz"): "--data.on_bad_image can't be 'zzz'; valid are error, skip",
}


@pytest.mark.parametrize("rest", VALUES, ids=" ".join)
def test_values_that_can_t_be_are_told_and_the_parser_refuses_them_too(rest):
    with pytest.raises(WrongUsage) as caught:
        check_flags("fit", taken_apart(rest))
    assert str(caught.value) == VALUES[rest]
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        FinetuneCLI(["fit", *rest])


def test_values_of_a_data_class_of_one_s_own_are_left_to_it():
    check_flags("fit", taken_apart(["--data.resize", "squosh", "--data", "my.Data"]))


def test_what_is_taken_for_choices_numbers_and_optimizers_is():
    choices = {f"--{full}": list(valid) for full, valid in CHOICES.items() if full != "tta"}
    numbers = [f"--{full}=1" for full in sorted(NUMBERS - {"top_k", "abstain_below"})]
    # All options stand in one line, which costs the parser no more than one: the i-th value of each.
    for i in range(max(map(len, choices.values()))):
        line = [f"{flag}={valid[min(i, len(valid) - 1)]}" for flag, valid in choices.items()]
        line += numbers if i == 0 else []
        parse(["fit", *line])
        check_flags("fit", taken_apart(line))
    for name in OPTIMIZERS.split():
        assert issubclass(getattr(torch.optim, name), torch.optim.Optimizer)


@pytest.mark.parametrize("full", sorted(CHOICES.keys() - {"tta"}))
def test_no_value_that_the_signature_has_is_refused(full):
    group, name = full.split(".")
    signature = inspect.signature({"model": Classifier, "data": ImageDataModule}[group])
    assert set(CHOICES[full]) == set(get_args(signature.parameters[name].annotation))


def test_beside_another_lightning_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(known_flags, "version", lambda name: "2.7.0")
    check_flags("fit", taken_apart(["--trainer.new", "3"]))
