"""Write a value as YAML on one line, as the parser reads it."""

import json
import re
from collections.abc import Callable
from typing import Any

_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


def flow_yaml(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return a value as JSON that is also YAML.

    Characters beyond ASCII are escaped as in YAML: libyaml does not accept the surrogate pairs that JSON uses.

    Args:
        value: Strings, numbers, lists and mappings.
        default: Converts any other value into one of these.

    Raises:
        TypeError: A value is of another type and cannot be converted.
    """
    text = json.dumps(value, ensure_ascii=False, default=default)
    return _BEYOND_ASCII.sub(lambda character: f"\\U{ord(character[0]):08x}", text)
