"""Configs: files that are found by name, and their short words.

A config is a file, or else one that is shipped with the package. `epochs: 3` in it is `trainer: {max_epochs: 3}`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.commands.options import WORDS
from finetune.commands.parsed_line import ParsedLine
from finetune.system.messages import NotFound, WrongUsage, did_you_mean

# Settings that are a class with arguments.
CLASSES = frozenset({"data", "model.optimizer"})


def shipped() -> dict[str, Path]:
    """Return the shipped configs by file name. In a checkout they lie next to the package, else inside it."""
    package = Path(__file__).parents[1]
    folders = (package / "configs", package.parent / "configs")
    folder = next((f for f in folders if f.is_dir()), folders[0])
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str) -> str:
    """Return the path of the config `name`.

    Raises:
        NotFound: It is neither a file nor shipped; the message suggests shipped ones.
        WrongUsage: It is empty, or not UTF-8.
    """
    if Path(name).is_file():
        _check_text(Path(name))
        return name
    available = shipped()
    for candidate in (name, f"{name}.yaml"):
        if candidate in available:
            return str(available[candidate])
    names = (
        available if name.endswith(".yaml") else [path.removesuffix(".yaml") for path in available]
    )
    raise NotFound(
        f"there is no config {name!r}, and none of that name is shipped{did_you_mean(name, names)}"
    )


def _check_text(path: Path) -> None:
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WrongUsage(
            f"the config {path} is not UTF-8: byte {error.start} is not readable"
        ) from error
    if not text.strip():
        raise WrongUsage(f"the config {path} is empty")


def put_configs_first(line: ParsedLine) -> None:
    """Move the configs of a command line before all other flags, each by its path.

    Later options win, so flags win over configs wherever they are typed.
    """
    configs: list[tuple[str, str | None]] = []
    others: list[tuple[str, str | None]] = []
    for name, value in line.flags:
        if name == "config" and value is not None:
            configs.append((name, find(value)))
        else:
            others.append((name, value))  # the parser reports a --config that has no value
    line.flags = configs + others


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
