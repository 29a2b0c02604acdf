"""Checks of single values of a checkpoint, which may be untrusted: their types and ranges."""

from typing import Any, NoReturn


def table(value: Any, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return a dict that must have exactly these keys."""
    if type(value) is not dict or value.keys() != set(fields):
        refuse(name, value)
    return value


def number(value: Any, name: str, least: float, most: float) -> float:
    """Return a float that must be from `least` to `most`."""
    if type(value) is not float or not least <= value <= most:
        refuse(name, value)
    return value


def whole(value: Any, name: str, most: int, least: int = 1) -> int:
    """Return a whole number that must be from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        refuse(name, value)
    return value


def refuse(name: str, value: Any) -> NoReturn:
    """Raise the error for a value that no fit writes."""
    text = (
        repr(value) if value is None or type(value) in (int, float, str) else type(value).__name__
    )
    raise ValueError(
        f"the checkpoint is not as `finetune fit` writes them: its {name} is {text[:80]}"
    )
