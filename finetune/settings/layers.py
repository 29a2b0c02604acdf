"""Who says what about the settings of a command: defaults, configs, a run that continues, decisions, and flags."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from finetune.settings.all_commands import COMMANDS
from finetune.settings.configs import config_text
from finetune.settings.fields import (
    ClassSettings,
    Section,
    Setting,
    find_setting,
    has_flag,
    nearest,
    option_name,
    section_in,
    settings_of,
    words_of,
)
from finetune.settings.schema import DATA_CLASSES
from finetune.system.messages import WrongUsage

S = TypeVar("S", bound=Section)
Kind = Literal["run", "checkpoint", "config", "command_line", "python", "decided"]


class Layer(NamedTuple):
    """What one source says.

    Attributes:
        source: Its name: the path of a config, a run or a checkpoint, or the command.
        kind: What it is.
        values: Values by the full names of settings, typed and in range. A class has `NAME.class_path`, which is None
            for none, and each of its arguments.
    """

    source: str
    kind: Kind
    values: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_typed(self) -> bool:
        """Whether it is what the user passes to this command: flags and places, or arguments in Python."""
        return self.kind in ("command_line", "python")


class Explicit(NamedTuple):
    """The class that a setting names, such as the optimizer, with the arguments that somebody has set for it.

    Attributes:
        chosen: The class and these arguments; None for null.
        dropped: The arguments that were set for another class, with it.
    """

    chosen: ClassSettings | None
    dropped: Mapping[str, tuple[Any, str]]


@dataclass(frozen=True)
class Layers:
    """The layers of a command, lowest first: a higher one wins."""

    command: str
    layers: tuple[Layer, ...] = ()

    @property
    def kind(self) -> type[Section]:
        """The settings that the command has."""
        return COMMANDS[self.command].settings

    def layer_of(self, name: str) -> Layer | None:
        """Return the layer whose value of a setting counts; None for the default."""
        return next((layer for layer in reversed(self.layers) if name in layer.values), None)

    def value(self, name: str) -> Any:
        """Return the value of a setting."""
        layer = self.layer_of(name)
        return self._setting(name).default if layer is None else layer.values[name]

    def is_explicit(self, name: str) -> bool:
        """Return whether the user sets a setting, or a part of it, in this command or a config."""
        return any(
            key == name or key.startswith(f"{name}.")
            for layer in self.layers
            if layer.is_typed or layer.kind == "config"
            for key in layer.values
        )

    @property
    def typed(self) -> dict[str, Any]:
        """What the user passes to this command."""
        return {
            name: value
            for layer in self.layers
            if layer.is_typed
            for name, value in layer.values.items()
        }

    def on_top(self, layer: Layer) -> "Layers":
        """Return these layers with another one that wins."""
        return replace(self, layers=(*self.layers, layer))

    def below_configs(self, layer: Layer) -> "Layers":
        """Return these layers with another one below what the user sets."""
        num = sum(one.kind in ("run", "checkpoint") for one in self.layers)
        return replace(self, layers=(*self.layers[:num], layer, *self.layers[num:]))

    def explicit_class(self, name: str) -> Explicit:
        """Return the class of a setting, such as model.optimizer, with the arguments that were set for it.

        An argument belongs to the class that its layer, or one below, names. Naming another class drops it.
        """
        default = self._setting(name).default
        class_path = default.class_path
        arguments: dict[str, Any] = {}
        dropped: dict[str, tuple[Any, str]] = {}
        for layer in self.layers:
            named = layer.values.get(f"{name}.class_path", class_path)
            if named != class_path:
                dropped |= {key: (value, class_path) for key, value in arguments.items()}
                arguments = {}
                class_path = named
            arguments |= {
                key.removeprefix(f"{name}."): value
                for key, value in layer.values.items()
                if key.startswith(f"{name}.") and not key.endswith(".class_path")
            }
        chosen = None if class_path is None else ClassSettings(class_path, arguments)
        return Explicit(chosen, dropped)

    def parse(self, kind: type[S]) -> S:
        """Return the settings that hold, as a section of this kind.

        Raises:
            WrongUsage: A class of the data has no such argument, or settings do not fit each other.
        """
        values = {name: value for layer in self.layers for name, value in layer.values.items()}
        for name, setting in settings_of(kind).items():
            if setting.about.arguments is not None:
                values[name] = self._class(name)
        self.check_data()
        if values.get("data.class_path", DATA_CLASSES[0]) not in DATA_CLASSES:
            arguments = {name[5:]: values[name] for name in values if name.startswith("data.")}
            values["data"] = ClassSettings(arguments.pop("class_path"), arguments)
        return _filled(kind, values, "")

    def printed(self) -> str:
        """Return the settings as a config of the same fit: without defaults that other settings may change."""
        settings = self.parse(self.kind)
        if not hasattr(settings, "model"):
            return config_text(settings)
        optimizer = self.explicit_class("model.optimizer").chosen
        is_set = self.layer_of("model.head_stages") is not None
        settings = replaced(settings, {"model.optimizer": optimizer})
        return config_text(settings, () if is_set else ("model.head_stages",))

    def _class(self, name: str) -> ClassSettings | None:
        """Return a class with its arguments: those of the default, if it is the default class, below the explicit."""
        chosen = self.explicit_class(name).chosen
        default = self._setting(name).default
        if chosen is None or chosen.class_path != default.class_path:
            return chosen
        return ClassSettings(chosen.class_path, {**default.init_args, **chosen.init_args})

    def check_data(self) -> None:
        """Refuse arguments of the data that our classes do not have, if the user names no other class.

        Raises:
            WrongUsage: There is one.
        """
        named = self.layer_of("data.class_path")
        if named is not None and named.values["data.class_path"] not in DATA_CLASSES:
            return
        for layer in self.layers:
            for name in layer.values:
                if name.startswith("data.") and find_setting(self.kind, name) is None:
                    raise unknown(self.command, layer, name)

    def _setting(self, name: str) -> Setting:
        setting = find_setting(self.kind, name)
        assert setting is not None, name
        return setting


def _filled(kind: type[S], values: Mapping[str, Any], prefix: str) -> S:
    """Return a section with the values by full names that it has."""
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        name = f"{prefix}{field.name}"
        section = section_in(field.type)
        if name in values:
            arguments[field.name] = values[name]
        elif section is not None:
            arguments[field.name] = _filled(section, values, f"{name}.")
    return kind(**arguments)


R = TypeVar("R", bound=Section | ClassSettings)


def replaced(settings: R, values: Mapping[str, Any]) -> R:
    """Return settings with other values, by full names; optimizer and scheduler as a whole."""
    if isinstance(settings, ClassSettings):
        return msgspec.structs.replace(settings, init_args={**settings.init_args, **values})
    changes: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key in values}:
        inner = {
            key.partition(".")[2]: value
            for key, value in values.items()
            if key.startswith(f"{name}.")
        }
        changes[name] = replaced(getattr(settings, name), inner) if inner else values[name]
    return msgspec.structs.replace(settings, **changes)


def unknown(command: str, layer: Layer, name: str, typed: str = "") -> WrongUsage:
    """Return the error about a setting that a command does not have.

    Args:
        command: The command.
        layer: The source that has it.
        name: Its full name.
        typed: As it is typed on the command line.
    """
    section = COMMANDS[command].settings
    is_line = layer.kind == "command_line"
    typed = typed or (f"--{name}" if is_line else name)
    start = f"{layer.source} has no option {typed}"
    meant = nearest(section, name)
    flags = [one for one in settings_of(section).values() if has_flag(section, one.name)]
    synonyms = {also for one in flags for also in one.about.also.split()}
    others = [
        other
        for other, (kind, _) in COMMANDS.items()
        if has_flag(kind, words_of(kind).get(name, name))
    ]
    if others and command not in others and name not in synonyms:
        kind = COMMANDS[others[0]].settings
        option = option_name(kind, words_of(kind).get(name, name), others[0])
        return WrongUsage(f"{start}: {option} is one of finetune {others[0]}")
    if meant is not None:
        option = option_name(section, meant, command) if is_line else repr(meant)
        return WrongUsage(f"{start}; did you mean {option}?")
    return WrongUsage(f"{start}; finetune {command} --help all has all of them")
