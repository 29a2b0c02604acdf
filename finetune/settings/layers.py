"""What the user sets, read and stored by who says it: defaults, configs, a run, decisions, flags, Python.

A setting has its short word or its full name, and may stand in nested tables. A class with arguments is `class_path`
and `init_args`, as Lightning writes it; `init_args` may be omitted.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from finetune.settings.all_commands import COMMANDS
from finetune.settings.configs import config_text, find, load, to_config
from finetune.settings.fields import (
    ClassSettings,
    Section,
    Setting,
    find_setting,
    from_text,
    has_flag,
    is_class,
    nearest,
    option_name,
    section_in,
    settings_of,
    words_of,
)
from finetune.settings.schema import DATA_CLASSES
from finetune.system.messages import WrongUsage, did_you_mean

S = TypeVar("S", bound=Section)
Kind = Literal["run", "checkpoint", "config", "command_line", "python", "decided"]

_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")  # negative numbers are values
# Flags of all commands that take no value from the next argument; the words that are meant for a switch before them.
_ALONE = frozenset({"h", "help", "print_config"})
_TRUTH = frozenset(
    spelled
    for word in ("true", "false", "yes", "no", "on", "off", "null", "warn")
    for spelled in (word, word.title(), word.upper())
)
# The classes that need no module, and their modules. Those of torch are named here, to find a mistyped one before torch
# is imported.
_CLASSES = {
    "data": ("finetune", [one.removeprefix("finetune.") for one in DATA_CLASSES]),
    "model.scheduler": ("finetune", ["WarmupCosine"]),
    "model.optimizer": (
        "torch.optim",
        [
            *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS"),
            *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
        ],
    ),
}


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

    def without(self, values: Mapping[str, Any]) -> "Layers":
        """Return these layers without settings that have these values."""
        layers = [
            one._replace(
                values={
                    name: value
                    for name, value in one.values.items()
                    if name not in values or value != values[name]
                }
            )
            for one in self.layers
        ]
        return replace(self, layers=tuple(layers))

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
    for one in msgspec.structs.fields(kind):
        name = f"{prefix}{one.name}"
        section = section_in(one.type)
        if name in values:
            arguments[one.name] = values[name]
        elif section is not None:
            arguments[one.name] = _filled(section, values, f"{name}.")
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


@dataclass
class Line:
    """A command line.

    Attributes:
        command: Its command.
        flags: The value of each flag by the full name of its setting, None for none; that of the last one, if it is
            there twice.
        places: The positional arguments.
        configs: The values of --config.
        asks: What it asks for instead of running: `help`, `all` help, or `config`; "" for nothing.
    """

    command: str
    flags: dict[str, str | None] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    asks: str = ""

    @property
    def has_configs(self) -> bool:
        """Whether the command takes --config: fit, validate, test, predict and benchmark do."""
        return "data.root" in settings_of(COMMANDS[self.command].settings)

    def layers(self) -> "Layers":
        """Return the layers of the configs, and of the flags.

        Raises:
            WrongUsage: An option does not exist, or its value is wrong.
        """
        flags = read_values(self.command, _of_line(self.command), self.flags)
        if not self.configs:  # which may name a data class of the user
            Layers(self.command, (flags,)).check_data()
        configs = [read_config(self.command, name) for name in self.configs]
        return Layers(self.command, (*configs, flags))


def split_line(command: str, arguments: Sequence[str]) -> Line:
    """Return the flags and the places of a command line, without looking at their values.

    Raises:
        WrongUsage: An option begins with a single dash, or --config has no value.
    """
    line = Line(command)
    kind = COMMANDS[command].settings
    words = words_of(kind)
    switches = {name for name, one in settings_of(kind).items() if one.is_switch} | _ALONE
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            line.places += rest
            break
        if not is_flag(argument):
            line.places.append(argument)
            continue
        typed, equals, text = argument.partition("=")
        name = typed.lstrip("-")
        full = _without_init_args(words.get(name, name))
        value = text if equals else _value_after(rest, full in switches)
        if name in ("h", "help"):
            line.asks = "help"
        elif name == "print_config":
            line.asks = "config"
        elif name in ("c", "config") and line.has_configs:
            if value is None:
                raise WrongUsage("--config needs a value")
            line.configs.append(value)
        elif not typed.startswith("--"):
            raise unknown(command, _of_line(command), full, typed)
        else:
            line.flags[full] = "true" if value is None and full in switches else value
    if line.asks == "help" and line.places[:1] == ["all"]:
        line.asks = "all"
    return line


def _of_line(command: str) -> Layer:
    return Layer(f"finetune {command}", "command_line")


def _value_after(rest: list[str], is_switch: bool) -> str | None:
    """Take the value of a flag from the arguments after it; None if the flag stands alone."""
    is_alone = not rest or rest[0] == "--" or is_flag(rest[0])
    if is_alone or (is_switch and rest[0] not in _TRUTH):
        return None
    return rest.pop(0)


def is_flag(argument: str) -> bool:
    """Return whether an argument is a flag; a negative number and a single dash are values."""
    if len(argument) < 2 or argument[0] != "-" or argument == "--" or _NUMBER.match(argument):
        return False
    return " " not in argument.partition("=")[0]


def read_config(command: str, name: str, kind: Kind = "config") -> Layer:
    """Return the layer of a config, by its path or the name of a shipped one.

    Raises:
        NotFound: There is none.
        WrongUsage: It is not YAML in UTF-8, has no settings, one that there is not, or a wrong value.
    """
    path = find(name)
    return read_values(command, Layer(str(path), kind), load(path))


def read_values(command: str, layer: Layer, table: Mapping[str, Any]) -> Layer:
    """Return a layer with the settings of a table, which may have short words.

    Args:
        command: The command whose settings they are.
        layer: The layer without values. Those of a command line are text.
        table: Nested tables, values by full names, or both.

    Raises:
        WrongUsage: There is no such setting, it has a wrong value, or it is set twice.
    """
    kind = COMMANDS[command].settings
    words = words_of(kind)
    found: dict[str, Any] = {}
    for word, value in table.items():
        key = words.get(word, word)
        if layer.kind == "command_line" and value is None:
            if not is_class(kind, key):
                _setting(command, layer, key, value)
            raise WrongUsage("needs a value", key)
        if layer.kind == "command_line" and value.startswith("{"):
            value = from_text(value)
        for name, one in _settings_in(kind, {key: value}):
            if name in found and not layer.is_typed:
                raise WrongUsage(f"{layer.source} sets {name} twice")
            found[name] = _typed(command, layer, name, one)
    return layer._replace(values=found)


def _settings_in(
    kind: type[Section], table: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested tables by the full names of their settings."""
    settings = settings_of(kind)
    for key, value in table.items():
        name = _without_init_args(f"{prefix}{key}")
        is_group = name not in settings and any(one.startswith(f"{name}.") for one in settings)
        if isinstance(value, Mapping) and (is_group or is_class(kind, name)):
            yield from _settings_in(kind, value, f"{name}.")
        elif is_group and value is None:
            continue  # a table without settings
        elif is_class(kind, name):
            yield f"{name}.class_path", value
        else:
            yield name, value


def flat(settings: Section) -> dict[str, Any]:
    """Return the values of settings by their full names; of a class `NAME.class_path` and each of its arguments."""
    return dict(_settings_in(type(settings), to_config(settings)))


def _without_init_args(name: str) -> str:
    return re.sub(r"\.init_args(?=\.|$)", "", name)


def _typed(command: str, layer: Layer, name: str, value: Any) -> Any:
    """Return the value of a setting as its type.

    Raises:
        WrongUsage: There is no such setting, or its value is wrong.
    """
    group, _, last = name.rpartition(".")
    is_path = last == "class_path" and is_class(COMMANDS[command].settings, group)
    setting = Setting(name, Any, None) if is_path else _setting(command, layer, name, value)
    try:
        is_text = layer.kind == "command_line" and isinstance(value, str)
        value = setting.read(value, is_text)
        return class_path(group, value) if is_path else value
    except WrongUsage as error:
        if layer.is_typed:
            raise
        raise WrongUsage(f"{layer.source}: {error}") from error


def _setting(command: str, layer: Layer, name: str, value: Any) -> Setting:
    """Return the setting of a name, which may be an argument of an own data class.

    Raises:
        WrongUsage: There is none; the message has the value if it stands for a table.
    """
    kind = COMMANDS[command].settings
    setting = find_setting(kind, name)
    if setting is not None and (layer.kind != "command_line" or has_flag(kind, name)):
        return setting
    if name.startswith("data.") and name.count(".") == 1:
        return Setting(name, Any, None)
    if any(one.startswith(f"{name}.") for one in settings_of(kind)):
        hint = f"; did you mean --backbone {value}?" if name == "model" else ""
        raise WrongUsage(f"takes a table of settings, not {value!r}{hint}", name)
    raise unknown(command, layer, name)


def class_path(name: str, value: Any) -> str | None:
    """Return the import path of the class that a setting names: `SGD` is torch.optim.SGD.

    Raises:
        WrongUsage: It is no name of a class.
    """
    if value is None and name == "model.scheduler":
        return None
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        hint = "; a folder of images is finetune fit FOLDER" if name == "data" else ""
        raise WrongUsage(f"takes the name of a class, not {value!r}{hint}", name)
    if "." in value:
        return value
    home, names = _CLASSES[name]
    known = {one.lower(): one for one in names}
    if value.lower() in known:
        return f"{home}.{known[value.lower()]}"
    if name == "model.scheduler":  # torch is not imported yet
        return f"torch.optim.lr_scheduler.{value}"
    hint = did_you_mean(value, names)
    if name == "data" and value.islower():
        hint = "; a folder of images is finetune fit FOLDER"
    raise WrongUsage(f"cannot be {value!r}{hint}", name)
