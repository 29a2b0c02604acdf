"""Settings that hold names, such as those of classes: `null`, `no` and `007` are text, unlike elsewhere in YAML."""

from collections.abc import Mapping
from typing import Any

from finetune.commands.flow_yaml import flow_yaml

# Settings that are names, or lists and mappings of names, by their names within a group.
_LISTS = frozenset({"exclude", "merge", "class_names"})
_MAPPINGS = frozenset({"columns", "class_mapping"})


def holds_names(full: str) -> bool:
    """Return whether a setting holds names."""
    return full.rpartition(".")[2] in _LISTS | _MAPPINGS


def names_in_text(full: str, text: str) -> str:
    """Return the value of a flag as YAML in which names are quoted; that of other settings as it is."""
    last = full.rpartition(".")[2].rstrip("+")
    if last not in _LISTS | _MAPPINGS:
        return text
    import yaml  # only if there are names: its import takes time

    try:
        value = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError:
        value = text
    if isinstance(value, list) or (last in _MAPPINGS and isinstance(value, dict)):
        return flow_yaml(value)
    return flow_yaml([text]) if last in _LISTS else text


def put_names(content: Any, text: str) -> None:
    """Make names in the content of a config text, in place, where YAML has made them numbers, for example.

    Args:
        content: The content.
        text: The text that it was read from.
    """
    import yaml

    if isinstance(content, dict):
        _put(content, yaml.load(text, yaml.BaseLoader))


def _put(content: dict[Any, Any], texts: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if key not in texts or value is None:  # a key of a merged mapping, or no names
            continue
        # Weights of classes become text, too, which their parser takes.
        if holds_names(str(key)) or str(key).rpartition(".")[2] == "class_weights":
            content[key] = texts[key]
        elif isinstance(value, dict) and isinstance(texts[key], dict):
            _put(value, texts[key])
