"""Loggers by name in configs; on the command line: test_flag_checks.py."""

import pytest
from command_lines import parse_typed

BOTH = ["finetune.WandbLogger", "finetune.MLFlowLogger"]


@pytest.mark.parametrize(
    ("config", "classes"),
    [
        ("logger: wandb,mlflow", BOTH),
        ("trainer: {logger: [wandb, mlflow]}", BOTH),
        ("trainer.logger: wandb", BOTH[:1]),
        ("logger: finetune.WandbLogger", BOTH[:1]),
    ],
)
def test_a_config_names_loggers(config, classes, tmp_path):
    (tmp_path / "some.yaml").write_text(config)
    parsed = parse_typed(["fit", str(tmp_path), "--config", str(tmp_path / "some.yaml")])
    loggers = parsed.trainer.logger
    loggers = loggers if isinstance(loggers, list) else [loggers]
    assert [logger.class_path for logger in loggers] == classes
