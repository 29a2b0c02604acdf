"""Who says what about the settings of a command: defaults, configs, a run that continues, decisions, and flags."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from finetune.settings.all_commands import COMMANDS
from finetune.settings.configs import config_text, find, flattened, read_table, table_in
from finetune.settings.fields import (
    ClassSettings,
    Section,
    Setting,
    find_setting,
    has_flag,
    is_class,
    nearest,
    option_name,
    settings_of,
    words_of,
)
from finetune.settings.schema import DATA_CLASSES
from finetune.system.messages import WrongUsage, did_you_mean

S = TypeVar("S", bound=Section)
Kind = Literal["default", "config", "run", "decided", "flag"]

# The classes that need no module, and their modules. Those of torch are named here, to find a mistyped one before torch
# is imported.
_CLASSES = {
    "data": (("finetune", tuple(one.removeprefix("finetune.") for one in DATA_CLASSES)),),
    "model.scheduler": (("finetune", ("WarmupCosine",)),),
    "model.optimizer": (
        (
            "torch.optim",
            (
                *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS"),
                *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
            ),
        ),
    ),
}
_NULL = (None, "null", "~")


class Layer(NamedTuple):
    """What one source says.

    Attributes:
        source: Its name: the path of a config or a run, or the command.
        kind: What it is; `flag` also for arguments in Python.
        values: Values by the full names of settings, typed and in range. A class has `NAME.class_path`, which is None
            for none, and each of its arguments.
        is_command_line: Whether it is a command line, whose values are texts.
    """

    source: str
    kind: Kind
    values: Mapping[str, Any] = MappingProxyType({})
    is_command_line: bool = False


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
        """Return whether a flag or a config sets a setting, or a part of it."""
        return any(
            key == name or key.startswith(f"{name}.")
            for layer in self.layers
            if layer.kind in ("config", "flag")
            for key in layer.values
        )

    @property
    def flags(self) -> dict[str, Any]:
        """What flags set, or the arguments in Python."""
        return {
            name: value
            for layer in self.layers
            if layer.kind == "flag"
            for name, value in layer.values.items()
        }

    def on_top(self, layer: Layer) -> "Layers":
        """Return these layers with another one that wins."""
        return replace(self, layers=(*self.layers, layer))

    def below_configs(self, layer: Layer) -> "Layers":
        """Return these layers with another one below what the user sets."""
        num = sum(one.kind in ("default", "run") for one in self.layers)
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
        data = dict(self._data(values))
        classes = {
            name: self._class(name)
            for name, setting in settings_of(kind).items()
            if setting.about.arguments is not None
        }
        return _filled(kind, {**values, **data, **classes}, "")

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

    def _data(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the arguments of an own data class; refuse those that ours do not have."""
        prefix = "data."
        given = {name: value for name, value in values.items() if name.startswith(prefix)}
        if values.get("data.class_path", DATA_CLASSES[0]) not in DATA_CLASSES:
            arguments = {name.removeprefix(prefix): value for name, value in given.items()}
            arguments.pop("class_path")
            yield "data.own", arguments
            return
        for name in given:
            if find_setting(self.kind, name) is None:
                layer = self.layer_of(name)
                assert layer is not None, "somebody has set it"
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
        if isinstance(field.type, type) and issubclass(field.type, Section):
            arguments[field.name] = _filled(field.type, values, f"{name}.")
        elif name in values:
            arguments[field.name] = values[name]
    return kind(**arguments)


def replaced(settings: S, values: Mapping[str, Any]) -> S:
    """Return settings with other values, by full names; a class as a whole."""
    changes: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key in values}:
        inner = {
            key.partition(".")[2]: value
            for key, value in values.items()
            if key.startswith(f"{name}.")
        }
        changes[name] = replaced(getattr(settings, name), inner) if inner else values[name]
    return msgspec.structs.replace(settings, **changes)


def read_config(command: str, name: str, kind: Kind = "config") -> Layer:
    """Return the layer of a config, by its path or the name of a shipped one.

    Raises:
        NotFound: There is none.
        WrongUsage: It is damaged, or has a setting that there is not, or a wrong value.
    """
    path = find(name)
    table = read_table(path)
    return make_layer(command, Layer(str(path), kind), table.values, table.texts)


def make_layer(
    command: str, empty: Layer, values: Mapping[str, Any], texts: Mapping[str, Any] | None = None
) -> Layer:
    """Return a layer with the settings of a table, which may have short words.

    Args:
        command: The command whose settings they are.
        empty: A layer without values.
        values: Nested tables, values by full names, or both. A value may be text, as a flag has it.
        texts: The same table as texts (`configs.Table`); None for the values.

    Raises:
        WrongUsage: There is no such setting, it has a wrong value, or it is set twice.
    """
    section = COMMANDS[command].settings
    words = words_of(section)
    texts = values if texts is None else texts
    found: dict[str, Any] = {}
    for key, value in values.items():
        full = words.get(str(key), str(key))
        inner = table_in(value) if isinstance(value, str) and value.startswith("{") else None
        pair = (value, texts.get(key, value)) if inner is None else (inner.values, inner.texts)
        for name, one in flattened(section, {full: pair[0]}, {full: pair[1]}):
            if name in found and empty.kind != "flag":
                raise WrongUsage(f"{empty.source} sets {name} twice")
            is_text = inner is None and empty.is_command_line
            found[name] = _typed(command, empty, name, one, is_text)
    return empty._replace(values=found)


def _typed(command: str, layer: Layer, name: str, value: Any, is_text: bool) -> Any:
    """Return the value of a setting as its type, if it is the text of a flag as YAML has it.

    Raises:
        WrongUsage: There is no such setting, or its value is wrong.
    """
    section = COMMANDS[command].settings
    group, _, last = name.rpartition(".")
    if last == "class_path" and is_class(section, group):
        return class_path(group, value)
    setting = find_setting(section, name)
    if setting is None and group == "data":
        setting = Setting(name, Any, None)  # perhaps of an own class
    if setting is None and any(one.startswith(f"{name}.") for one in settings_of(section)):
        hint = f"; did you mean --backbone {value}?" if name == "model" else ""
        raise WrongUsage(f"takes a table of settings, not {value!r}{hint}", name)
    if setting is None:
        raise unknown(command, layer, name)
    try:
        return setting.read(value) if is_text else setting.converted(value)
    except WrongUsage as error:
        if layer.kind == "flag":
            raise
        raise WrongUsage(f"{layer.source}: {error}") from error


def class_path(name: str, value: Any) -> str | None:
    """Return the import path of the class that a setting names: `SGD` is torch.optim.SGD.

    Raises:
        WrongUsage: It is no name of a class.
    """
    if value in _NULL and name == "model.scheduler":
        return None
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        hint = "; a folder of images is finetune fit FOLDER" if name == "data" else ""
        raise WrongUsage(f"takes the name of a class, not {value!r}{hint}", name)
    if "." in value:
        return value
    known = {one.lower(): (home, one) for home, names in _CLASSES[name] for one in names}
    if value.lower() in known:
        return ".".join(known[value.lower()])
    if name == "model.scheduler":  # torch is not imported yet
        return f"torch.optim.lr_scheduler.{value}"
    hint = did_you_mean(value, [one for _, one in known.values()])
    if name == "data" and value.islower():
        hint = "; a folder of images is finetune fit FOLDER"
    raise WrongUsage(f"cannot be {value!r}{hint}", name)


def unknown(command: str, layer: Layer, name: str, typed: str = "") -> WrongUsage:
    """Return the error about a setting that a command does not have.

    Args:
        command: The command.
        layer: The source that has it.
        name: Its full name.
        typed: As it is typed on the command line.
    """
    section = COMMANDS[command].settings
    typed = typed or (f"--{name}" if layer.is_command_line else name)
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
        option = option_name(section, meant, command) if layer.is_command_line else repr(meant)
        return WrongUsage(f"{start}; did you mean {option}?")
    return WrongUsage(f"{start}; finetune {command} --help all has all of them")
