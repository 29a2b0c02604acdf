"""The options of the running command, by which messages of code that several commands share name them.

The settings of a fit, such as `--data.root`, are options of fit, validate, test, predict and benchmark. Other commands
have some of them, such as `--root` of check. Without a command, in Python, settings have the names of options of fit.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

# settings that the running command has as options without the group; None if it has all of them in full
_settings: frozenset[str] | None = None


@contextmanager
def only_settings(names: Collection[str] | None) -> Iterator[None]:
    """Name options as a command does that has only these settings, such as `data.root`, within the context.

    Args:
        names: The settings, which are options without their group; None for all settings, in full.
    """
    global _settings
    before = _settings
    _settings = None if names is None else frozenset(names)
    try:
        yield
    finally:
        _settings = before


def option(setting: str) -> str:
    """Return the option for a setting such as `data.root`; "" if the running command has none."""
    if _settings is None:
        return f"--{setting}"
    return f"--{setting.rpartition('.')[2]}" if setting in _settings else ""


def with_option(setting: str, text: str) -> str:
    """Return a part of a message that names the option for a setting; "" if the running command has none.

    Args:
        setting: The setting.
        text: The part of the message, with {} in the place of the option.
    """
    name = option(setting)
    return text.replace("{}", name) if name else ""
