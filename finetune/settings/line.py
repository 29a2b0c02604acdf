"""Read a command line: flags by short words and full names, and what stands by its position."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from finetune.settings.all_commands import COMMANDS
from finetune.settings.fields import Section, has_flag, is_class, settings_of, words_of
from finetune.settings.layers import Layer, unknown
from finetune.system.messages import WrongUsage

_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")  # negative numbers are values
# Flags of all commands that take no value from the next argument; the values that a switch takes.
_ALONE = frozenset({"h", "help", "print_config"})
_TRUTH = frozenset(
    spelled
    for word in ("true", "false", "yes", "no", "on", "off", "null", "warn")
    for spelled in (word, word.title(), word.upper())
)
_GROUPS = ("data", "model", "trainer")


@dataclass
class Line:
    """A command line.

    Attributes:
        command: Its command.
        flags: The value of each flag by the full name of its setting; that of the last one, if it is there twice.
        places: What stands by its position.
        configs: The values of --config.
        asks: What it asks for instead of running: `help`, `all` help, or `config`; "" for nothing.
    """

    command: str
    flags: dict[str, str] = field(default_factory=dict)
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
        WrongUsage: An option does not exist, or has no value.
    """
    line = Line(command)
    kind = COMMANDS[command].settings
    words = words_of(kind)
    switches = {name for name, one in settings_of(kind).items() if one.is_switch} | _ALONE
    for typed, value in _parts(arguments, words, switches):
        name = typed.lstrip("-")
        full = ".".join(part for part in words.get(name, name).split(".") if part != "init_args")
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
        elif not typed.startswith("--") or not _may_be(kind, full):
            raise unknown(
                command, Layer(f"finetune {command}", "flag", is_command_line=True), full, typed
            )
        elif value is None and full not in switches:
            raise WrongUsage("needs a value", full)
        else:
            line.flags[full] = "true" if value is None else value
    _check_data(line)
    if line.asks == "help" and line.places[:1] == ["all"]:
        line.asks = "all"
    return line


def _check_data(line: Line) -> None:
    """Refuse options of the data that only an own class could have, if none is named."""
    kind = COMMANDS[line.command].settings
    if line.configs or not {"data", "data.class_path"}.isdisjoint(line.flags):
        return
    for name in line.flags:
        if not has_flag(kind, name) and name not in _GROUPS:
            raise unknown(
                line.command, Layer(f"finetune {line.command}", "flag", is_command_line=True), name
            )


def _may_be(kind: type[Section], name: str) -> bool:
    """Return whether an option exists, or may be one of an own data class."""
    group = name.partition(".")[0]
    if "data.root" in settings_of(kind) and (name in _GROUPS or group == "data"):
        return True
    if name.endswith(".class_path"):
        return is_class(kind, name.removesuffix(".class_path"))
    return has_flag(kind, name)


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
