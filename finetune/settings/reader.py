"""Read what the user sets: command lines, configs, and arguments in Python, each as a layer of typed settings.

A setting has its short word or its full name, and may stand in nested tables. A class with arguments is `class_path`
and `init_args`, as Lightning writes it; `init_args` may be omitted.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from finetune.settings import yaml_text
from finetune.settings.all_commands import COMMANDS
from finetune.settings.configs import find
from finetune.settings.fields import (
    Section,
    Setting,
    find_setting,
    has_flag,
    is_class,
    settings_of,
    words_of,
)
from finetune.settings.layers import Kind, Layer, Layers, unknown
from finetune.settings.schema import DATA_CLASSES
from finetune.system.messages import WrongUsage, did_you_mean

_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")  # negative numbers are values
# Flags of all commands that take no value from the next argument; the values that a switch takes.
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


def split_line(command: str, arguments: Sequence[str]) -> Line:
    """Return the flags and the places of a command line, without looking at their values.

    Raises:
        WrongUsage: An option begins with a single dash.
    """
    line = Line(command)
    kind = COMMANDS[command].settings
    words = words_of(kind)
    switches = {name for name, one in settings_of(kind).items() if one.is_switch} | _ALONE
    for typed, value in _parts(arguments, words, switches):
        name = typed.lstrip("-")
        full = _without_init_args(words.get(name, name))
        if typed == "":
            line.places.append(value or "")
        elif name in ("h", "help"):
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


def _parts(
    arguments: Sequence[str], words: Mapping[str, str], switches: Collection[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield each flag as typed with its value, and each place with an empty flag."""
    i = 0
    while i < len(arguments):
        argument = arguments[i]
        i += 1
        if argument == "--":
            yield from (("", rest) for rest in arguments[i:])
            return
        if not is_flag(argument):
            yield "", argument
            continue
        typed, equals, text = argument.partition("=")
        value = text if equals else None
        name = typed.lstrip("-")
        following = arguments[i] if i < len(arguments) else "--"
        is_value = following in _TRUTH if words.get(name, name) in switches else True
        if value is None and is_value and following != "--" and not is_flag(following):
            value = following
            i += 1
        yield typed, value


def is_flag(argument: str) -> bool:
    """Return whether an argument is a flag; a negative number and a single dash are values."""
    if len(argument) < 2 or argument[0] != "-" or argument == "--" or _NUMBER.match(argument):
        return False
    return " " not in argument.partition("=")[0]


def read_flags(line: Line) -> Layer:
    """Return the layer of the flags of a command line.

    Raises:
        WrongUsage: An option does not exist, or its value is wrong.
    """
    layer = read_values(line.command, _of_line(line.command), line.flags)
    if not line.configs:  # which may name a data class of the user
        Layers(line.command, (layer,)).check_data()
    return layer


def read_config(command: str, name: str, kind: Kind = "config") -> Layer:
    """Return the layer of a config, by its path or the name of a shipped one.

    Raises:
        NotFound: There is none.
        WrongUsage: It is not YAML in UTF-8, has no settings, one that there is not, or a wrong value.
    """
    path = find(name)
    try:
        node = yaml_text.parse(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise WrongUsage(
            f"the config {path} is not UTF-8: byte {error.start} is not readable"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise WrongUsage(f"{path}{where}: not valid YAML: {problem}") from error
    if not isinstance(node, yaml.MappingNode):
        raise WrongUsage(f"{path} is not a config: it has no settings such as `epochs: 10`")
    return read_values(command, Layer(str(path), kind), node)


def read_values(command: str, layer: Layer, table: Mapping[str, Any] | yaml.MappingNode) -> Layer:
    """Return a layer with the settings of a table, which may have short words.

    Args:
        command: The command whose settings they are.
        layer: The layer without values. Those of a command line are text.
        table: Nested tables, values by full names, or both.

    Raises:
        WrongUsage: There is no such setting, it has a wrong value, or it is set twice.
    """
    words = words_of(COMMANDS[command].settings)
    found: dict[str, Any] = {}
    for key, value in _items(table):
        if layer.kind == "command_line" and str(value).startswith("{"):
            node = yaml_text.argument(value)
            value = node if isinstance(node, yaml.MappingNode) else value
        for name, one in _settings_in(COMMANDS[command].settings, {words.get(key, key): value}):
            if name in found and not layer.is_typed:
                raise WrongUsage(f"{layer.source} sets {name} twice")
            found[name] = _typed(command, layer, name, one)
    return layer._replace(values=found)


def _items(table: Mapping[Any, Any] | yaml.MappingNode) -> list[tuple[str, Any]]:
    if isinstance(table, yaml.MappingNode):
        return [*{key.value: value for key, value in table.value}.items()]
    return [(str(key), value) for key, value in table.items()]


def _settings_in(
    kind: type[Section], table: Mapping[Any, Any] | yaml.MappingNode, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested tables by the full names of their settings."""
    settings = settings_of(kind)
    for key, value in _items(table):
        name = _without_init_args(f"{prefix}{key}")
        is_table = isinstance(value, Mapping | yaml.MappingNode)
        is_null = isinstance(value, yaml.Node) and yaml_text.is_null(value)
        is_group = name not in settings and any(one.startswith(f"{name}.") for one in settings)
        if is_table and (is_group or is_class(kind, name)):
            yield from _settings_in(kind, value, f"{name}.")
        elif is_group and is_null:
            continue  # a table without settings
        elif is_class(kind, name):
            yield f"{name}.class_path", value
        else:
            yield name, value


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
        if isinstance(value, yaml.Node):
            value = setting.read(value)
        elif layer.kind == "command_line" and value is None:
            raise WrongUsage("needs a value", name)
        elif layer.kind == "command_line":
            value = setting.read(yaml_text.argument(value), value)
        else:
            value = setting.converted(value)
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
        text = value.value if isinstance(value, yaml.ScalarNode) else value
        hint = f"; did you mean --backbone {text}?" if name == "model" else ""
        raise WrongUsage(f"takes a table of settings, not {text!r}{hint}", name)
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
