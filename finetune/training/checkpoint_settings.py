"""The arguments of a `Classifier` from an untrusted checkpoint. They are plain values and name no class to import."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml

from finetune.models.checkpoint import HYPER_PARAMETERS


def model_settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Classifier` in a checkpoint.

    Raises:
        ValueError: There is an unknown argument, or a value that no fit writes.
    """
    settings = plain(checkpoint["hyper_parameters"], "hyper_parameters")
    for name in settings.keys() - HYPER_PARAMETERS.keys():
        raise ValueError(
            f"the checkpoint is not as `finetune fit` writes them: its hyper_parameters have {name!r}"
        )
    for class_path in class_paths(settings):
        raise ValueError(
            f"the checkpoint is not as `finetune fit` writes them: its hyper_parameters name {class_path}"
        )
    return settings


def plain(value: Any, name: str) -> dict[str, Any]:
    """Return a copy of nested plain values, with tuples as lists.

    Raises:
        ValueError: `value` is not a dict, or holds other values. The message calls it `name`.
    """

    def copied(value: Any) -> Any:
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: copied(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return [copied(inner) for inner in value]
        if value is None or type(value) in (str, int, float, bool):
            return value
        raise ValueError(
            f"the checkpoint is not as `finetune fit` writes them: its {name} hold {type(value).__name__}"
        )

    settings = copied(value)
    if not isinstance(settings, dict):
        raise ValueError(
            f"the checkpoint is not as `finetune fit` writes them: its {name} are no dict"
        )
    return settings


def class_paths(value: Any) -> Iterator[Any]:
    """Yield every class path in nested values, including text that YAML parses as nested values."""
    if isinstance(value, str):
        # raised for 4006-38-13 and for !!bool x
        with suppress(yaml.YAMLError, ValueError, AttributeError, LookupError):
            parsed = yaml.safe_load(value)
            value = parsed if isinstance(parsed, (dict, list)) else None
    if isinstance(value, dict):
        if "class_path" in value:
            yield value["class_path"]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from class_paths(inner)
