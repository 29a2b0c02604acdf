"""Read the explicit settings of a command line: those that configs and flags give, in one spelling, without defaults.

`--data.image_size 32`, `--data.init_args.image_size=32`, `--data '{init_args: {image_size: 32}}'` and
`--data FILE.yaml` all give `data.image_size`. The command line is read before any class is imported: the data class of
a checkpoint may be imported only if the user has named it. The parser does not have this information: it adds the class
path of the default, and reads a flag only if the class that it belongs to is known.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from finetune.commands.config_files import CLASSES, in_full_names
from finetune.commands.parsed_line import ParsedLine, parse_line
from finetune.system.messages import WrongUsage

# Settings whose value may be a table: as text, or as the path of a file.
_TABLES = frozenset({"", "data", "model", "trainer", "model.optimizer", "trainer.logger"})


class Config(NamedTuple):
    """The settings of one `--config`.

    Attributes:
        source: Its path, or its text.
        settings: Values by full name.
    """

    source: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ExplicitSettings:
    """The settings of a command line, by full names without `init_args`.

    Attributes:
        flags: The settings of flags; the last one counts. A value is text unless it is part of a table.
        configs: The settings of configs, in order. They are not merged: a learning rate belongs to the optimizer of
            its own config.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    configs: tuple[Config, ...] = ()

    def has_flag(self, name: str) -> bool:
        """Return whether a flag gives a setting, or a part of it."""
        return any(key == name or key.startswith(f"{name}.") for key in self.flags)

    def arguments_of(self, group: str) -> set[str]:
        """Return the names of the settings of a group that flags or configs give."""
        keys = {*self.flags, *(key for config in self.configs for key in config.settings)}
        return {key.removeprefix(f"{group}.") for key in keys if key.startswith(f"{group}.")}

    def last(self, name: str) -> Any:
        """Return the value of a setting: that of a flag, or else of the last config that has it; None for none."""
        sources = [self.flags, *(config.settings for config in reversed(self.configs))]
        return next((source[name] for source in sources if name in source), None)


def read_explicit_settings(arguments: Sequence[str]) -> ExplicitSettings:
    """Return the settings that a command line gives.

    Args:
        arguments: The command, then its arguments in full spelling, with the paths of configs.
    """
    line = parse_line(arguments[1:])
    configs = tuple(
        Config(value, _config_settings(arguments[0], value))
        for name, value in line.flags
        if name == "config" and value
    )
    return ExplicitSettings(flag_settings(line), configs)


def _config_settings(command: str, text: str) -> dict[str, Any]:
    """Return the settings in a config, which may have short words of a command, by full names."""
    table, folder = _read_table(text, "")
    if not isinstance(table, dict):  # the parser refuses it
        return {}
    with suppress(WrongUsage):  # the parser reports it
        table = in_full_names(command, table)
    return _settings("", table, folder)


def flag_settings(line: ParsedLine) -> dict[str, Any]:
    """Return the settings that the flags of a command line give, by full names."""
    settings: dict[str, Any] = {}
    for name, value in line.flags:
        if name != "config":
            settings |= _settings(_plain(name), value, "")
    return settings


def _plain(name: str) -> str:
    """Return a name without `init_args`, nor the `+` that extends a list."""
    return ".".join(part for part in name.rstrip("+").split(".") if part != "init_args")


def _settings(name: str, value: Any, folder: str) -> dict[str, Any]:
    """Return the settings in a value, by full names.

    Args:
        name: Where the value belongs; "" for a config.
        value: Text, or a value of YAML.
        folder: The folder that paths in it are relative to.
    """
    if name not in _TABLES:
        return {name: value}
    if isinstance(value, str):
        value, folder = _read_table(value, folder)
    settings: dict[str, Any] = {}
    if isinstance(value, dict):
        for key, inner in _without_init_args(value):
            full = _plain(f"{name}.{key}" if name else key)
            if full != name:  # else the parser refuses it
                settings |= _settings(full, inner, folder)
    elif name in CLASSES and isinstance(value, str):
        settings[f"{name}.class_path"] = value
    elif name:  # else it is a config, which the parser refuses
        settings[name] = value
    return settings


def _without_init_args(table: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a table, and those of its `init_args` in their place.

    It goes no deeper: an `init_args` that names its own file, or contains itself, would have no end.
    """
    for key, value in table.items():
        if key != "init_args":
            yield str(key), value
        elif isinstance(value, dict):
            yield from ((str(inner), value[inner]) for inner in value)


def _read_table(text: str, folder: str) -> tuple[Any, str]:
    """Return the table in a text, or in the file that it names, and the folder of the paths in it.

    A text without a table is returned as it is.
    """
    import yaml  # only if there is a table: this is also called before a mistyped flag is reported

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    path = os.path.join(folder, text)
    try:
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                content = yaml.load(file, loader)
            return (content if isinstance(content, dict) else {}), os.path.dirname(path)
        content = yaml.load(text, loader)
    except (OSError, ValueError, yaml.YAMLError):  # the parser reports it
        return {}, folder
    return (content if isinstance(content, dict) else text), folder
