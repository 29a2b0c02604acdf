"""Shorthands for values and flags, replaced before the command line is parsed: `--optimizer adamw`, `--wandb`."""

import importlib.util
import os
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

from finetune.commands.given_arguments import LOGGERS, Given
from finetune.commands.option_names import AUTO, BACKBONES, OPTIMIZERS, TORCHVISION
from finetune.commands.short_words import both, in_full
from finetune.system.messages import WrongUsage

_SIMPLE_NAME = re.compile(r"[\w./~-]+")
_BACKBONE_OPTIONS = ("model.backbone", "backbone")


def replace_shorthands(command: str, given: Given) -> None:
    """Replace shorthands: names in another case, timm's networks without `timm/`, and flags such as `--wandb`.

    Args:
        command: The command.
        given: The arguments that follow it; changed in place.

    Raises:
        WrongUsage: A name stands where a group of settings is expected; the message suggests the right option.
    """
    optimizers = {name.lower(): name for name in OPTIMIZERS.split()}
    for i, (name, value) in enumerate(given.flags):
        full = in_full(command, name)
        if value is None:
            continue
        _check_group(command, full, value)
        if full == "model.optimizer":
            given.flags[i] = name, optimizers.get(value.lower(), value)
        elif full in _BACKBONE_OPTIONS and version("torchvision").startswith(f"{TORCHVISION}."):
            given.flags[i] = name, ",".join(network_name(part.strip()) for part in value.split(","))
    if command in ("fit", "benchmark"):
        _replace_logger_flags(given)


def _replace_logger_flags(given: Given) -> None:
    """Replace flags such as `--wandb` by `--trainer.logger`; their loggers follow those that it already names."""
    asked = [LOGGERS[name] for name, value in given.flags if name in LOGGERS and value != "false"]
    kept = [i for i, (name, _) in enumerate(given.flags) if name not in LOGGERS]
    given.as_typed = [given.as_typed[i] for i in kept]
    given.flags = [given.flags[i] for i in kept]
    has_others = given.has("trainer.logger", "trainer.logger+")
    if asked and not has_others:
        given.flags.append(
            ("trainer.logger", asked[0] if len(asked) == 1 else f"[{', '.join(asked)}]")
        )
    elif asked:
        given.flags += [("trainer.logger+", name) for name in asked]
    num_added = len(given.flags) - len(given.as_typed)
    given.as_typed += ["--trainer.logger"] * num_added


def network_name(name: str) -> str:
    """Return the full name of a network: torchvision's in lower case, timm's with `timm/`; others as they are."""
    if name.lower() == AUTO:
        return AUTO
    if name in BACKBONES.split() or name.startswith("timm/"):
        return name
    if name.lower() in BACKBONES.split():
        return name.lower()
    return f"timm/{name}" if name.partition(".")[0] in _names_of_timm() else name


@cache
def _names_of_timm() -> frozenset[str]:
    """Return the names of timm's networks from its source, since its import takes seconds; none if it is missing."""
    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in Path(folder, "models").glob("*.py")]
    texts = (path.read_text("utf-8", "replace") for path in files)
    return frozenset(
        name for text in texts for name in re.findall(r"^@register_model\ndef (\w+)\(", text, re.M)
    )


def _check_group(command: str, full: str, value: str) -> None:
    """Refuse a name where a table of settings is expected."""
    if (
        full not in ("model", "trainer", "data")
        or not _SIMPLE_NAME.fullmatch(value)
        or os.path.isfile(value)
    ):
        return
    if full == "data":
        if os.path.isdir(value) or "/" in value or (value[0].islower() and "." not in value):
            option = "data.predict" if command == "predict" else "data.root"
            raise WrongUsage(
                f"--data takes a data class, not {value!r}; did you mean {both(command, option)}?"
            )
        return
    hint = f"; did you mean {both(command, 'model.backbone')} {value}?" if full == "model" else ""
    raise WrongUsage(
        f"--{full} takes a table of settings, or a YAML file of them, not {value!r}{hint}"
    )
