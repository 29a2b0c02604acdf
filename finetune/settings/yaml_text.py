"""YAML as users mean it: 1e-3 is a number, and a folder called `1e5` is written in quotes.

What is read stays a node until the setting is known whose value it is: names of classes are text.
"""

import re
from contextlib import suppress
from typing import Any

import yaml

# YAML 1.1 reads such text as a word.
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_NULL = "tag:yaml.org,2002:null"


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, and refuses a key that stands twice in a table: the first value would be lost."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is there twice", key.start_mark
                )
            keys |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return node


class _Dumper(yaml.SafeDumper):
    """Writes `1e5` in quotes if it is text."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def parse(text: str) -> yaml.Node | None:
    """Return the node of a YAML text; None if it is empty.

    Raises:
        yaml.YAMLError: It is not YAML, contains itself, or has a key twice.
        ValueError: It has a date that there is not.
    """
    loader = _Loader(text)
    node: yaml.Node | None = loader.get_single_node()
    if node is not None:
        text_of(node)  # refuses what contains itself
        loader.construct_document(node)
    return node


def argument(text: str) -> yaml.Node:
    """Return the node of an argument of the command line: only lists and tables are in the form of YAML."""
    if text[:1] in ("[", "{"):
        with suppress(yaml.YAMLError, ValueError):
            if (node := parse(text)) is not None:
                return node
    return yaml.ScalarNode(_Loader("").resolve(yaml.ScalarNode, text, (text != "", False)), text)


def value_of(node: yaml.Node) -> Any:
    """Return the value of a node; its text if it looks like a value that there is not, such as a 32nd of May."""
    try:
        return _Loader("").construct_document(node)
    except (yaml.YAMLError, ValueError):
        return node.value


def text_of(node: yaml.Node) -> Any:
    """Return the value of a node in which all that is no list or table is text: names may look like numbers."""
    return yaml.BaseLoader("").construct_document(node)


def is_null(node: yaml.Node) -> bool:
    return node.tag == _NULL


def dump(value: Any) -> str:
    """Return a value as YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
