"""What `--help` shows of the commands with many options: one page each, without torch, which takes seconds.

`--help all` has all options. `tests/commands/test_help_pages.py` holds names and defaults against the real parser.
"""

from collections.abc import Sequence

from finetune.commands.help_texts import OWN_PAGES, PAGES, Option
from finetune.commands.short_words import WORDS

_AFTER = (
    "All options: finetune {command} --help all. A config that --config takes: finetune {command} ... --print_config",
    "Defaults are in brackets. A short word and the full name behind it say the same; configs have full names alone.",
)


def help_page(arguments: Sequence[str]) -> str | None:
    """Return the page that a command line asks for; None where it asks for none, or for all options."""
    command, rest = arguments[0], list(arguments[1:])
    asks = next((i for i, argument in enumerate(rest) if argument in ("-h", "--help")), None)
    if (
        command not in PAGES
        or asks is None
        or "--" in rest[:asks]
        or rest[asks + 1 : asks + 2] == ["all"]
    ):
        return None
    return page(command)


def page(command: str) -> str:
    """Return the help of a command."""
    usage, text, examples, groups = PAGES[command]
    lines = [
        f"usage: finetune {command} {usage}",
        "",
        text,
        "",
        "for example:",
        *(f"  {line}" for line in examples),
    ]
    for name, group in groups.items():
        lines += ["", f"{name}:", *(_line(command, option) for option in group)]
    return "\n".join([*lines, "", *_AFTER[command in OWN_PAGES :]]).format(command=command)


def options(command: str) -> list[Option]:
    """Return the options on a command's page."""
    return [option for group in PAGES[command][3].values() for option in group]


def _line(command: str, option: Option) -> str:
    words = [word for word, full in WORDS[command].items() if full == option.full]
    flags = ", ".join(f"--{name}" for name in (*words, option.full))
    default = f" [{option.default}]" if option.default is not None else ""
    return f"  {f'{flags} {option.value}':<40} {option.text.format(command=command)}{default}"
