"""The arguments of a `Classifier` from an untrusted checkpoint. They are plain values and name no class to import."""

from collections.abc import Mapping
from typing import Any

from finetune.models.checkpoint_sections import HYPER_PARAMETERS
from finetune.models.checkpoint_values import class_paths


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
