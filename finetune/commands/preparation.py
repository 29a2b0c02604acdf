"""How pictures are prepared for a network of timm's: as its weights say, unless somebody says otherwise."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.commands.parser import last_value, settings_in
from finetune.data.transforms import PREPARATION
from finetune.models.candidates import is_choice
from finetune.models.timm_backbones import describe, is_timm
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import last_checkpoint


def settle_preparation(config: Any, arguments: Sequence[str]) -> str:
    """Prepare a fit's pictures as the weights of timm were learned with; return what to tell of it.

    What the command line says holds, and what a config says that names this network (the config of an earlier run) or
    leaves the choice to the data. What others say was meant for another network. A run that goes on prepares them as
    before: the folder may be another, or gone, by then.

    Args:
        config: As parsed, with the subcommand; changed in place.
        arguments: The command line, configs before flags, their paths resolved.

    Raises:
        ValueError: The weights want what can't be had here.
    """
    if config.subcommand != "fit" or not is_timm(backbone := config["fit"].model.backbone):
        return ""
    data = config["fit"].data.init_args
    name_of, values = _meant(config["fit"], backbone)
    said = _said(arguments, backbone)
    told = []
    for name, value in values.items():
        if name not in data:
            told.append(f"not {name}, which its class does not take")
            continue
        if name in said:
            if data[name] != value:
                told.append(f"{name} {data[name]}, not {value}")
            continue
        data[name] = value
        told.append(f"{name} {value}")
    return f"pictures are prepared as {name_of} says: {', '.join(told)}" if told else ""


def _meant(options: Any, backbone: str) -> tuple[str, dict[str, Any]]:
    """Return who says how pictures are prepared, and the values of `PREPARATION`."""
    path = last_checkpoint(Path(options.resume)) if options.resume else options.ckpt_path
    if (
        path
        and (checkpoint := read_checkpoint(path))["hyper_parameters"].get("backbone") == backbone
    ):
        before = checkpoint["datamodule_hyper_parameters"]
        return str(path), {name: before[name] for name in PREPARATION if name in before}
    weights = options.model.weights
    about = describe(backbone, weights if weights and os.path.isdir(weights) else None)
    return about.name, {name: getattr(about, name) for name in PREPARATION}


def _said(arguments: Sequence[str], backbone: str) -> set[str]:
    """Return which of `PREPARATION` is meant for this network."""
    said = {
        name
        for name in PREPARATION
        if any(
            last_value(arguments, f"--data.{prefix}{name}") is not None
            for prefix in ("", "init_args.")
        )
    }
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, value = flag.partition("=")
        if name not in ("--config", "--data", "--data.init_args"):
            continue
        given = settings_in(value if has_value else following)
        if name == "--config":
            model = given.get("model") or {}
            model = settings_in(model) if isinstance(model, str) else model
            if model.get("backbone") != backbone and not is_choice(model.get("backbone")):
                continue
            given = given.get("data") or {}
            given = settings_in(given) if isinstance(given, str) else given
        said |= {**given, **(given.get("init_args") or {})}.keys() & set(PREPARATION)
    return said
