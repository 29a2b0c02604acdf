"""All options of fit, validate, test, predict and benchmark, in sections: for `--help all` and docs/reference.md."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser

from finetune.commands.help_pages import PAGES
from finetune.commands.options import OPTIONS, TABLE, WORDS, Option
from finetune.data.datasets.image_folder import ImageFolderData

# Options that are not shown: they have no meaning alone, or `--resume`, the data or the checkpoint decides them.
HIDDEN = (
    "help",
    "config",
    "print_config",
    "trainer",
    "model",
    "data",
    "ckpt_path",
    "model.class_names",
    "model.network_size",
    "model.label_kind",
)
_SECTIONS = {
    "": "the run",
    "data": "data",
    "model": "network and training",
    "trainer": "Lightning's Trainer, in its own words",
}
# Options that the table of short words describes better than Lightning does.
_IN_THE_TABLE = ("model.optimizer", "model.optimizer.lr", "seed_everything")
_WIDTH = 112
_INDENT = " " * 6


class ParserOption(NamedTuple):
    """An option of the parser.

    Attributes:
        name: The full name.
        default: Its default; None for none.
        text: What it does.
    """

    name: str
    default: Any
    text: str

    @property
    def group(self) -> str:
        """The part of the name before the first dot; "" without one."""
        return self.name.partition(".")[0] if "." in self.name else ""


# Arguments of the default optimizer and of the default scheduler, which the parser has no options for.
_OF_DEFAULTS = (
    ParserOption("model.optimizer.lr", None, "Learning rate of backbone and head."),
    ParserOption("model.optimizer.weight_decay", None, "Weight decay of the optimizer."),
    ParserOption(
        "model.scheduler.warmup", None, "Share of the steps in which the rate rises from 0."
    ),
)


def all_options(parser: ArgumentParser) -> Iterator[ParserOption]:
    """Yield the options of the parser of a command, after those of the default data class."""
    described = {}
    for base in reversed(ImageFolderData.__mro__):
        if base.__module__.startswith("finetune"):
            for item in parse_docstring(inspect.getdoc(base) or "").params:
                described[item.arg_name] = item.description or ""
    for name, parameter in inspect.signature(ImageFolderData).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            yield ParserOption(f"data.{name}", parameter.default, described.get(name, ""))
    for action in parser._actions:
        name = action.dest
        group = name.partition(".")[0]
        is_shown = action.default != "==SUPPRESS==" and f"--{name}" in action.option_strings
        if not is_shown or name in HIDDEN:
            continue
        if "." in name and group not in ("model", "trainer"):
            continue
        text = action.help or ""
        text = _first_sentence(text) if group == "trainer" else text
        yield ParserOption(name, action.default, text)


def shown_default(default: Any) -> str:
    """Return a default as YAML has it; "" for none, and for a table, which `--print_config` shows."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str | int | float):
        return str(default)
    return ""


def all_options_page(command: str, parser: ArgumentParser) -> str:
    """Return the help of a command with all its options, ours first."""
    rows = {option.full: option for option in TABLE if command in option.commands}
    sections: dict[str, list[ParserOption]] = {group: [] for group in _SECTIONS}
    for option in [*all_options(parser), *_OF_DEFAULTS]:
        if option.name in rows and option.group == "trainer":
            # Lightning's options that have a short word are next to ours.
            sections[""].append(option)
        elif option.name in OPTIONS[command]:
            sections[option.group].append(option)
    lines = [
        f"usage: finetune {command} {PAGES[command].usage}",
        "",
        f"All options of finetune {command}. The common ones with examples: finetune {command} --help",
    ]
    for group, options in sections.items():
        if not options:
            continue
        lines += ["", f"{_SECTIONS[group]}:"]
        is_of_checkpoint = group in ("data", "model") and command in ("validate", "test", "predict")
        if is_of_checkpoint:
            lines.append("  By default, these settings are those of the checkpoint.")
        for option in options:
            shown = option._replace(default=None) if is_of_checkpoint else option
            lines += _lines(command, shown, rows.get(option.name))
    lines += [
        "",
        f"A config that --config takes: finetune {command} ... --print_config",
        f"Arguments of another class of data: finetune {command} --data.help CLASS",
    ]
    return "\n".join(lines) + "\n"


def _lines(command: str, option: ParserOption, row: Option | None) -> Iterator[str]:
    words = [word for word, full in WORDS[command].items() if full == option.name]
    kind = OPTIONS[command].get(option.name)
    value = "|".join(kind) if isinstance(kind, list) else ""
    text = option.text
    default = shown_default(option.default)
    if row:
        value = row.value
        if option.group == "trainer" or option.name in _IN_THE_TABLE:
            text = row.text.format(command=command)
            default = row.default or default
    names = ", ".join(f"--{name}" for name in [*words, option.name])
    yield f"  {names} {value}".rstrip()
    text = " ".join(text.split())
    text = f"{text[:1].upper()}{text[1:]}"
    yield from textwrap.wrap(
        f"{text} [{default}]" if default else text,
        _WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_on_hyphens=False,
    )


def _first_sentence(text: str) -> str:
    """Return the first sentence of Lightning's text, without the marks of its documentation."""
    sentence = re.split(r"(?<=\.)\s|\sDefault:", text, maxsplit=1)[0]
    return re.sub(r":\w+:|``", "", sentence).replace("~pytorch_lightning.", "")
