"""Loggers by name: `--logger wandb,mlflow`. They are our classes in the run's folder; others have a class path."""

from types import MappingProxyType
from typing import Any

LOGGERS = MappingProxyType(
    {
        "tensorboard": "finetune.TensorBoardLogger",
        "wandb": "finetune.WandbLogger",
        "mlflow": "finetune.MLFlowLogger",
    }
)


def with_class_paths(value: Any) -> Any:
    """Return the value of `trainer.logger` with class paths in the place of names; another value as it is."""
    names = value.replace(" ", "").split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(name in LOGGERS for name in map(str, names)):
        return value
    paths = [LOGGERS[name] for name in names]
    return paths[0] if len(paths) == 1 else paths


def replace_in_config(content: dict[Any, Any]) -> None:
    """Replace the names of loggers in a config, or in its part `trainer`, in place."""
    for table in (content, content.get("trainer")):
        if isinstance(table, dict):
            for key in table.keys() & {"logger", "trainer.logger"}:
                table[key] = with_class_paths(table[key])
