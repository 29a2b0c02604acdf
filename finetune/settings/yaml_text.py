"""Read and write YAML as users mean it: 1e-3 is a number, and a folder called `1e5` is written in quotes."""

import re
from typing import Any

import yaml

# YAML 1.1 reads such text as a word.
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, and refuses a key that stands twice in a table: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key, _ in node.value:
            if (key.tag, key.value) in keys and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is there twice", key.start_mark
                )
            keys |= {(key.tag, key.value)} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes `1e5` in quotes if it is text."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def load(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: It is none.
        ValueError: It has a date that there is not.
    """
    return yaml.load(text, _Loader)


def load_texts(text: str) -> Any:
    """Return the value of a YAML text in which all that is no list or table is text: names may look like numbers.

    Raises:
        yaml.YAMLError: It is none.
    """
    return yaml.load(text, yaml.BaseLoader)


def dump(value: Any) -> str:
    """Return a value as YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
