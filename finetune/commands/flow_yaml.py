"""A value as YAML on one line, as the parser reads it."""

import json
import re
from collections.abc import Callable
from typing import Any

_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


def flow_yaml(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON that is YAML, too: libyaml takes no pair of surrogates for an emoji, as JSON writes it.

    Args:
        value: Of strings, numbers, lists and tables.
        default: Gives such a value for what is none.

    Raises:
        TypeError: There is something else in it.
    """
    text = json.dumps(value, ensure_ascii=False, default=default)
    return _BEYOND_ASCII.sub(lambda character: f"\\U{ord(character[0]):08x}", text)
