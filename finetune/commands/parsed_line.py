"""What stands on a command line: flags with their values, and what is named by position. As argparse would have it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

# Flags that mean a logger: `--wandb` is `--trainer.logger WandbLogger`.
LOGGERS = MappingProxyType(
    {
        "tensorboard": "TensorBoardLogger",
        "wandb": "WandbLogger",
        "mlflow": "MLFlowLogger",
    }
)
# Flags that take no value from the next argument, of all commands.
ALONE = frozenset({"h", "help", "print_config", "resume", *LOGGERS})
_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")  # argparse's own: these are values


@dataclass
class ParsedLine:
    """A command line, taken apart.

    Attributes:
        flags: Name without dashes and value of each, in their order; None where there is none.
        as_typed: The dashes and name of each flag, as typed.
        positionals: All that is named by position.
    """

    flags: list[tuple[str, str | None]] = field(default_factory=list)
    as_typed: list[str] = field(default_factory=list)
    positionals: list[str] = field(default_factory=list)

    def last(self, *names: str) -> str | None:
        """Return the last value of a flag that may have several names; None where it is not there."""
        return next((value for name, value in reversed(self.flags) if name in names), None)

    def has(self, *names: str) -> bool:
        return any(name in names for name, _ in self.flags)

    def asks_for_help(self) -> bool:
        return any(name in ("h", "help") or name.endswith(".help") for name, _ in self.flags)


def parse_line(arguments: Sequence[str]) -> ParsedLine:
    """Return the arguments that follow a command."""
    line, i = ParsedLine(), 0
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
        name, value = typed.lstrip("-"), text if equals else None
        if typed.startswith("-c"):  # and perhaps its value at once
            name = "config"
            value = argument[2:].removeprefix("=") or None
            typed = "-c"
        elif typed.startswith("-h"):
            name = "h"
            value = None
            typed = "-h"
        if value is None and name not in ALONE and i < len(arguments) and not is_flag(arguments[i]):
            value = arguments[i] if arguments[i] != "--" else None
            i += value is not None
        line.flags.append((name, value))
        line.as_typed.append(typed)
    return line


def is_flag(argument: str) -> bool:
    """Return whether an argument begins an option; a negative number and a lone dash are values."""
    if len(argument) < 2 or argument[0] != "-" or argument == "--" or _NUMBER.match(argument):
        return False
    return " " not in argument.partition("=")[0]


def format_line(command: str, line: ParsedLine) -> list[str]:
    """Return the arguments again, each flag in full and those named by position behind `--`."""
    arguments = [command]
    for name, value in line.flags:
        if value is None:
            arguments.append("-h" if name == "h" else f"--{name}")
        elif is_flag(value) or value == "--" or name in ALONE:
            arguments.append(f"--{name}={value}")
        else:
            arguments += [f"--{name}", value]
    return [*arguments, "--", *line.positionals] if line.positionals else arguments
