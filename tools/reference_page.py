"""Writes `docs/reference.md`: every option of every command, from the settings.

`make options` runs it; `tests/promises/test_help.py` fails where the page differs from what it would write.
"""

from collections.abc import Iterator
from pathlib import Path

from finetune.settings.all_commands import COMMANDS
from finetune.settings.fields import Setting, settings_of, words_of
from finetune.settings.pages import (
    GROUPS,
    OF_CHECKPOINT,
    group_of,
    has_groups,
    names_of,
    shown_default,
)

PAGE = Path(__file__).parents[1] / "docs/reference.md"
FIT = "fit"

_HEAD = """# Every option

Most used in `finetune fit`: {}.
`finetune COMMAND --help` prints the common options of a command, `finetune fit --help all` all of `fit`.

A short name and the full name are the same option; configs take both. Defaults are in brackets; an option without one
is off, or the program chooses its value. `validate`, `test` and `predict` also take the options of data and devices
that `fit` has. Errors have the same [exit codes](predict.md#exit-codes) in all commands, except
[`check`](check.md#check).

<!-- written by `make options` -->
"""


def reference() -> Iterator[str]:
    """Yield the lines of docs/reference.md: a table for each group of `fit`, and for each other command."""
    of_fit = settings_of(COMMANDS[FIT].settings)
    yield f"## finetune {FIT}\n"
    for group in ("model", "data", "trainer", ""):
        yield f"### {GROUPS[group][0].upper()}{GROUPS[group][1:]}\n"
        yield from _table(FIT, group_of(FIT, group))
    for command in (*OF_CHECKPOINT, *sorted(COMMANDS.keys() - {FIT, *OF_CHECKPOINT})):
        settings = settings_of(COMMANDS[command].settings)
        as_fit = of_fit if has_groups(command) else {}
        own = [
            one
            for name, one in settings.items()
            if name not in as_fit or one.help != as_fit[name].help
        ]
        yield f"## finetune {command}\n"
        yield from _table(command, own)


def _table(command: str, settings: list[Setting]) -> Iterator[str]:
    words = words_of(COMMANDS[command].settings)
    anchors = {words[name]: name for name in _common()} if command == FIT else {}
    yield "| option | meaning [default] |"
    yield "| --- | --- |"
    for setting in settings:
        names = ", ".join(f"`{name}`" for name in names_of(setting, words).split(", "))
        if setting.name in anchors:
            names = f'<a id="{anchors[setting.name]}"></a>{names}'
        default = shown_default(command, setting)
        yield f"| {names} | {setting.help}{f' [`{default}`]' if default else ''} |"
    yield ""


def _common() -> list[str]:
    """Return the short names of the most used options of `fit`: those on its help page."""
    kind = COMMANDS[FIT].settings
    listed = " ".join(kind.page.sections.values()).split()
    return [name for name in listed if name in words_of(kind)]


def page() -> str:
    """Return the page."""
    links = ", ".join(f"[`--{name}`](#{name})" for name in _common())
    return "\n".join([_HEAD.format(links), *reference()]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
