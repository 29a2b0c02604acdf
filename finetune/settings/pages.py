"""The help pages: the short page of a command, and the page with all its options."""

import re
import textwrap
from collections.abc import Mapping

from finetune.settings.all_commands import COMMANDS
from finetune.settings.fields import (
    ClassSettings,
    Setting,
    has_flag,
    helps_of,
    settings_of,
    words_of,
)

_WIDTH = 80  # columns of a short page
_TEXT = 29  # column of the text of an option
_WIDE = 112  # columns of a page with all options
_INDENT = " " * 6
GROUPS = {
    "": "the run",
    "data": "data",
    "model": "network and training",
    "trainer": "devices, length and output",
}
# Their settings are those of the checkpoint, if nobody sets them.
OF_CHECKPOINT = ("validate", "test", "predict")
_SENTENCE = re.compile(r"(?<=\w)\. (?=[A-Z`-])")


def help_page(command: str) -> str:
    """Return the short help of a command."""
    kind = COMMANDS[command].settings
    page = kind.page
    settings = settings_of(kind)
    words = words_of(kind)
    lines = [f"usage: finetune {command} {page.usage}", "", *textwrap.wrap(page.text, _WIDTH), ""]
    lines += ["for example:", *(f"  finetune {line}" for line in page.examples), ""]
    word_of = {full: word for word, full in words.items()}
    # in the order of the docstring: those of a command come before those of the sections that it extends
    ordered = [name for name in helps_of(kind) if name in settings]
    own = [word_of.get(name, name) for name in ordered if not settings[name].about.place]
    for heading, names in (page.sections or {"options": " ".join(own)}).items():
        lines.append(f"{heading}:")
        for name in names.split():
            setting = settings[words.get(name, name)]
            lines += _short_lines(f"--{name} {setting.placeholder}".rstrip(), command, setting)
    more = f" All options: finetune {command} --help all" if page.sections else ""
    return "\n".join([*lines, "", f"Defaults are in brackets.{more}"])


def _short_lines(flag: str, command: str, setting: Setting) -> list[str]:
    default = shown_default(command, setting)
    sentence = _SENTENCE.split(setting.help)[0].rstrip(".")
    text = f"{sentence} [{default}]" if default else sentence
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {flag} ".ljust(_TEXT),
        subsequent_indent=" " * _TEXT,
        break_on_hyphens=False,
    )


def all_options_page(command: str) -> str:
    """Return the help of a command with all its options."""
    kind = COMMANDS[command].settings
    if not has_groups(command):
        return help_page(command)
    lines = [
        f"usage: finetune {command} {kind.page.usage}",
        "",
        f"All options of finetune {command}. The common ones with examples: finetune {command} --help",
    ]
    words = words_of(kind)
    for group, title in GROUPS.items():
        lines += ["", f"{title}:"]
        if group in ("data", "model") and command in OF_CHECKPOINT:
            lines.append("  By default, these settings are those of the checkpoint.")
        for setting in group_of(command, group):
            lines.append(f"  {names_of(setting, words)} {setting.placeholder}".rstrip())
            default = shown_default(command, setting)
            text = f"{setting.help} [{default}]" if default else setting.help
            lines += textwrap.wrap(
                text,
                _WIDE,
                initial_indent=_INDENT,
                subsequent_indent=_INDENT,
                break_on_hyphens=False,
            )
    lines += ["", f"A config that --config takes: finetune {command} ... --print_config"]
    return "\n".join(lines)


def has_groups(command: str) -> bool:
    return "data.root" in settings_of(COMMANDS[command].settings)


def group_of(command: str, group: str) -> list[Setting]:
    """Return the settings of a section; those of the command itself if it is ""."""
    kind = COMMANDS[command].settings
    return [
        one
        for name, one in settings_of(kind).items()
        if has_flag(kind, name) and name.rpartition(".")[0].partition(".")[0] == group
    ]


def names_of(setting: Setting, words: Mapping[str, str]) -> str:
    """Return the short word and the full name of a setting, as flags."""
    short = [f"--{word}" for word, full in words.items() if full == setting.name]
    return ", ".join([*short, f"--{setting.name}"])


def shown_default(command: str, setting: Setting) -> str:
    """Return a default as YAML has it; "" for none, and for one that a checkpoint decides."""
    default = setting.default
    name, _, argument = setting.name.rpartition(".")
    whole = settings_of(COMMANDS[command].settings).get(name)
    if whole is not None and isinstance(whole.default, ClassSettings):
        default = whole.default.init_args[argument]
    if isinstance(default, ClassSettings):
        default = default.class_path.rpartition(".")[2]
    is_decided = setting.name.startswith(("data.", "model.")) and command in OF_CHECKPOINT
    if is_decided or not isinstance(default, bool | str | int | float):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)
