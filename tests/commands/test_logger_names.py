"""Loggers by name, on the command line and in configs."""

import json

import pytest
import yaml
from command_lines import parse

from finetune.api.command_words import command_line
from finetune.commands.logger_names import replace_in_config, replace_logger_names
from finetune.commands.parsed_line import format_line, parse_line
from finetune.system.messages import WrongUsage


def named(arguments: list[str]) -> list[str]:
    given = parse_line(arguments)
    replace_logger_names(given)
    return format_line("fit", given)[1:]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--trainer.logger", "WandbLogger"], ["--trainer.logger", "finetune.WandbLogger"]),
        (["--trainer.logger", "wandb"], ["--trainer.logger", "finetune.WandbLogger"]),
        (
            ["--trainer.logger=tensorboardlogger"],
            ["--trainer.logger", "finetune.TensorBoardLogger"],
        ),
        (["--trainer.logger=MLFlowLogger"], ["--trainer.logger", "finetune.MLFlowLogger"]),
        (
            ["--trainer.logger+=TensorBoardLogger"],
            ["--trainer.logger+", "finetune.TensorBoardLogger"],
        ),
        (
            ["--trainer.logger.help", "WandbLogger"],
            ["--trainer.logger.help", "finetune.WandbLogger"],
        ),
        (
            ["--trainer.logger.class_path", "MLFlowLogger"],
            ["--trainer.logger.class_path", "finetune.MLFlowLogger"],
        ),
        (
            ["--trainer.logger", "pytorch_lightning.loggers.TensorBoardLogger"],
            ["--trainer.logger", "finetune.TensorBoardLogger"],
        ),
        (
            ["--trainer.logger", "[WandbLogger, {class_path: MLFlowLogger, init_args: {}}]"],
            [
                "--trainer.logger",
                json.dumps(
                    [
                        "finetune.WandbLogger",
                        {"class_path": "finetune.MLFlowLogger", "init_args": {}},
                    ]
                ),
            ],
        ),
        *(
            (same, same)
            for same in (
                ["--trainer.logger", "mine.WandbLogger"],
                ["--trainer.logger", "CometLogger"],
                ["--trainer.logger", "false"],
                ["--trainer.logger", "[1, {"],
                ["--trainer.logger"],
                ["--data.root", "WandbLogger"],
                ["--trainer.logger.name", "WandbLogger"],
                ["--trainer.logger.help", "CSVLogger"],
            )
        ),
    ],
)
def test_names_on_the_command_line(given, meant):
    assert named(given) == meant


def test_names_in_a_config():
    init_args = {"name": "WandbLogger"}
    trainer = {
        "logger": {"class_path": "TensorBoardLogger", "init_args": init_args},
        "max_epochs": 1,
    }
    named = replace_in_config({"trainer": trainer, "data": {"root": "WandbLogger"}})
    assert named["trainer"]["logger"] == {
        "class_path": "finetune.TensorBoardLogger",
        "init_args": {"name": "WandbLogger"},
    }
    assert named["trainer"]["max_epochs"] == 1 and named["data"] == {"root": "WandbLogger"}
    assert replace_in_config({"logger": "WandbLogger", "max_epochs": 1}) == {
        "logger": "finetune.WandbLogger",
        "max_epochs": 1,
    }
    for other in (
        "WandbLogger",
        None,
        3,
        {"trainer": None},
        {"trainer": {"max_epochs": 1}},
        {"name": "WandbLogger"},
    ):
        assert replace_in_config(other) == other


def test_both_reach_the_parser(tmp_path, colours):
    content = {"trainer": {"logger": ["WandbLogger", "MLFlowLogger"]}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    line = ["fit", "--data.root", str(colours)]
    found = parse([*line, "--config", str(tmp_path / "mine.yaml")]).trainer.logger
    assert [one.class_path for one in found] == ["finetune.WandbLogger", "finetune.MLFlowLogger"]
    found = parse(
        [*line, "--trainer.logger", "WandbLogger", "--trainer.logger.offline", "false"]
    ).trainer.logger
    assert found.class_path == "finetune.WandbLogger" and found.init_args.offline is False


@pytest.mark.slow
def test_what_trainer_is_given_goes_the_same_way(tmp_path, colours):
    (tmp_path / "trainer.yaml").write_text(
        "logger:\n  class_path: WandbLogger\n  init_args: {tags: [mine]}\n"
    )
    (tmp_path / "mine.yaml").write_text("trainer: trainer.yaml\n")
    in_python = command_line(None, {}, {"trainer": {"logger": "WandbLogger"}})
    for given in (
        ["--trainer", str(tmp_path / "trainer.yaml")],
        ["--config", str(tmp_path / "mine.yaml")],
        ["--trainer", "{logger: WandbLogger}"],
        in_python[1:],
    ):
        found = parse(["fit", "--data.root", str(colours), *given]).trainer.logger
        assert found.class_path == "finetune.WandbLogger"


def test_lightnings_csv_logger_needs_a_place():
    with pytest.raises(
        WrongUsage, match=r"CSVLogger: a run's metrics.csv and steps.csv have .*save_dir FOLDER$"
    ):
        named(["--trainer.logger", "CSVLogger"])
    for place in ("--trainer.logger.save_dir", "--trainer.logger.init_args.save_dir"):
        placed = ["--trainer.logger", "CSVLogger", place, "here"]
        assert named(placed) == placed


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        (
            "WandLogger",
            "^--trainer.logger: there is no logger 'WandLogger'; did you mean 'WandbLogger'",
        ),
        ("[TensorbordLogger]", "no logger 'TensorbordLogger'; did you mean 'TensorBoardLogger'"),
        ("NeptuneLogger", "no logger 'NeptuneLogger'"),
        ("Sacred", "no logger 'Sacred'; valid are TensorBoardLogger, WandbLogger, MLFlowLogger$"),
        (
            "TensorBoardLogger,WandbLogger",
            r"takes several loggers in brackets: '\[TensorBoardLogger, WandbLogger\]'$",
        ),
        ("[TensorBoardLogger", r"takes several loggers in brackets: '\[TensorBoardLogger\]'$"),
    ],
)
def test_names_that_there_are_not(value, reported):
    with pytest.raises(WrongUsage, match=reported):
        named(["--trainer.logger", value])
