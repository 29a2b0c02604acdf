"""Prepare images for a network of timm as its weights require, unless explicit settings differ."""

import os
from typing import Any

from finetune.commands.explicit_settings import ExplicitSettings
from finetune.data.transforms import PREPARATION
from finetune.models.candidates import is_choice
from finetune.models.timm_backbones import describe, is_timm
from finetune.runs.resume import Start


def settle_preparation(config: Any, explicit: ExplicitSettings, start: Start | None = None) -> str:
    """Set the preparation of images with which timm's weights were trained; return a message about it.

    Flags take precedence. So do configs that name this network, such as the config of an earlier run, or that leave the
    choice of the network to the data. Values in other configs are meant for another network and are replaced. A resumed
    run prepares images as before, since the folder of the weights may have changed or disappeared.

    Args:
        config: As parsed, with the subcommand; changed in place.
        explicit: The settings that configs and flags give.
        start: The checkpoint from which training starts; None for none.

    Raises:
        ValueError: The weights require a preparation that is not supported.
    """
    if config.subcommand != "fit" or not is_timm(backbone := config["fit"].model.backbone):
        return ""
    data = config["fit"].data.init_args
    name_of, values = _recommended(config["fit"].model, start)
    explicit_names = _explicit_names(backbone, explicit)
    settings = []
    for name, value in values.items():
        if name not in data:
            settings.append(f"not {name}, which its class does not take")
            continue
        if name in explicit_names:
            if data[name] != value:
                settings.append(f"{name} {data[name]}, not {value}")
            continue
        data[name] = value
        settings.append(f"{name} {value}")
    return f"images are prepared as defined by {name_of}: {', '.join(settings)}" if settings else ""


def _recommended(model: Any, start: Start | None) -> tuple[str, dict[str, Any]]:
    """Return the source of the recommended preparation, and its values for `PREPARATION`."""
    if start is not None and start.content["hyper_parameters"].get("backbone") == model.backbone:
        before = start.content["datamodule_hyper_parameters"]
        return str(start.path), {name: before[name] for name in PREPARATION if name in before}
    weights = model.weights
    folder = weights if weights and os.path.isdir(weights) else None
    about = describe(model.backbone, folder)
    return about.name, {name: getattr(about, name) for name in PREPARATION}


def _explicit_names(backbone: str, explicit: ExplicitSettings) -> set[str]:
    """Return the names in `PREPARATION` that flags or configs set for this network."""
    explicit_names = {name for name in PREPARATION if explicit.has_flag(f"data.{name}")}
    for config in explicit.configs:
        backbone_of_config = config.settings.get("model.backbone")
        if backbone_of_config == backbone or is_choice(backbone_of_config):
            explicit_names |= {name for name in PREPARATION if f"data.{name}" in config.settings}
    return explicit_names
