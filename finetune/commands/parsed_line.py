"""Parse a command line into flags and positional arguments, with the rules of argparse."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

# Flags of all commands that take no value from the next argument.
ALONE = frozenset({"h", "help", "print_config", "resume"})
_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")  # as in argparse: negative numbers are values


@dataclass
class ParsedLine:
    """A parsed command line.

    Attributes:
        flags: The name without dashes and the value of each flag, in order; None for no value.
        as_typed: The dashes and the name of each flag, as typed.
        positionals: The positional arguments.
    """

    flags: list[tuple[str, str | None]] = field(default_factory=list)
    as_typed: list[str] = field(default_factory=list)
    positionals: list[str] = field(default_factory=list)

    def last(self, *names: str) -> str | None:
        """Return the last value of a flag that may have several names; None if it does not occur."""
        return next((value for name, value in reversed(self.flags) if name in names), None)

    def has(self, *names: str) -> bool:
        return any(name in names for name, _ in self.flags)

    def only_prints(self) -> bool:
        """Return whether it asks for help or for the config."""
        return self.asks_for_help() or any(
            name.startswith("print_config") for name, _ in self.flags
        )

    def asks_for_help(self) -> bool:
        return any(name in ("h", "help") or name.endswith(".help") for name, _ in self.flags)


def parse_line(arguments: Sequence[str]) -> ParsedLine:
    """Parse the arguments after a command."""
    line = ParsedLine()
    i = 0
    while i < len(arguments):
        argument = arguments[i]
        i += 1
        if argument == "--":
            line.positionals += arguments[i:]
            break
        if not is_flag(argument):
            line.positionals.append(argument)
            continue
        typed, equals, text = argument.partition("=")
        name = typed.lstrip("-")
        value = text if equals else None
        if typed.startswith("-c"):  # its value may follow without a space
            name = "config"
            value = argument[2:].removeprefix("=") or None
            typed = "-c"
        elif typed.startswith("-h"):
            name = "h"
            value = None
            typed = "-h"
        if value is None and name not in ALONE and i < len(arguments) and not is_flag(arguments[i]):
            value = arguments[i] if arguments[i] != "--" else None
            if value is not None:
                i += 1
        line.flags.append((name, value))
        line.as_typed.append(typed)
    return line


def is_flag(argument: str) -> bool:
    """Return whether an argument is a flag; a negative number and a single dash are values."""
    if len(argument) < 2 or argument[0] != "-" or argument == "--" or _NUMBER.match(argument):
        return False
    return " " not in argument.partition("=")[0]


def format_line(command: str, line: ParsedLine) -> list[str]:
    """Return the command line as arguments, with positional arguments after `--`."""
    arguments = [command]
    for name, value in line.flags:
        if value is None:
            arguments.append("-h" if name == "h" else f"--{name}")
        elif is_flag(value) or value == "--" or name in ALONE:
            arguments.append(f"--{name}={value}")
        else:
            arguments += [f"--{name}", value]
    return [*arguments, "--", *line.positionals] if line.positionals else arguments
