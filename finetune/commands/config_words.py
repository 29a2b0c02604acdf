"""Short words of the command line in configs: `epochs: 3` is the same as `trainer: {max_epochs: 3}`."""

from collections.abc import Mapping
from typing import Any

from finetune.commands.options import WORDS
from finetune.system.messages import WrongUsage

# Settings that are a class with arguments.
CLASSES = frozenset({"data", "model.optimizer"})


def has_words(command: str, config: Mapping[Any, Any]) -> bool:
    """Return whether a config has short words of a command."""
    return any(key in WORDS.get(command, {}) for key in config)


def in_full_names(command: str, config: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a config with full names in the place of the short words of a command, as nested tables.

    Raises:
        WrongUsage: A setting is there by both names.
    """
    words = WORDS.get(command, {})
    full = {key: value for key, value in config.items() if key not in words}
    # a class comes before its arguments
    for word in sorted(words.keys() & config.keys(), key=lambda word: words[word]):
        _put(full, word, words[word], config[word])
    return full


def _put(config: dict[Any, Any], word: str, name: str, value: Any) -> None:
    """Set the value of a setting in a config, in place."""
    *groups, last = name.split(".")
    table = config
    path = ""
    for group in groups:
        path = f"{path}.{group}".lstrip(".")
        table = _inner_table(config, table, word, path)
        if path in CLASSES:
            table["init_args"] = dict(table.get("init_args") or {})
            table = table["init_args"]
    if name in CLASSES and isinstance(value, str):
        _check_dotted(config, word, name)
        if isinstance(table.get(last), Mapping):
            table[last] = dict(table[last])
            table = table[last]
            last = "class_path"
    if last in table or name in config:
        raise WrongUsage(f"the config gives {name} twice: as {word}, and by its full name")
    table[last] = value


def _inner_table(
    config: dict[Any, Any], table: dict[Any, Any], word: str, path: str
) -> dict[Any, Any]:
    """Return a copy of the group `path` of a config, put into `table`, which has it."""
    group = path.rpartition(".")[2]
    inner = table.get(group)
    if isinstance(inner, str) and path in CLASSES and not _is_file_name(inner):
        inner = {"class_path": inner}
    if inner is not None and not isinstance(inner, Mapping):
        raise WrongUsage(f"{word} is a part of {path}, and the config has {path}: {inner}")
    if path in CLASSES:
        _check_dotted(config, word, path)
    table[group] = dict(inner or {})
    return table[group]


def _check_dotted(config: Mapping[Any, Any], word: str, path: str) -> None:
    """Check that no dotted key of a config belongs to a class, which the parser would read after the short words."""
    dotted = next((key for key in config if str(key).startswith(f"{path}.")), None)
    if dotted is not None:
        raise WrongUsage(f"the config has {dotted}: write {word} by its full name, too")


def _is_file_name(text: str) -> bool:
    """Return whether a text is the name of a file with a table, not the name of a class."""
    return "/" in text or text.endswith((".yaml", ".yml", ".json"))
