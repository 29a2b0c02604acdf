"""Keys of a state dict that omit the name of one submodule.

The weights of a `Classifier` are in its submodule `image_classifier`. Checkpoints name them `network.…`, `mean` and
`std`, without the name of this submodule.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn


def omit_name(owner: nn.Module, name: str) -> None:
    """Omit the name of a submodule from the keys of the state dicts that its owner returns and loads.

    To load them, use `with_versions` too.
    """
    owner.register_state_dict_post_hook(partial(_shorten, name=name))
    owner.register_load_state_dict_pre_hook(partial(_lengthen, name=name))


def with_versions(state_dict: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a shallow copy of a state dict in which torch finds the versions of the modules within a submodule.

    Args:
        state_dict: Its keys omit the name of the submodule; so does the table of versions that torch attaches to it.
        name: The submodule.
    """
    versions = getattr(state_dict, "_metadata", None)
    if versions is None:
        return state_dict
    copied: Any = OrderedDict(state_dict)
    copied._metadata = {**versions, **{f"{name}.{path}": own for path, own in versions.items()}}
    return copied


def _shorten(
    owner: nn.Module,
    state_dict: Any,
    prefix: str,
    local_metadata: Mapping[str, Any],
    *,
    name: str,
) -> None:
    """Hook after `state_dict`."""
    versions = getattr(state_dict, "_metadata", {})
    versions.pop(f"{prefix}{name}", None)
    full = f"{prefix}{name}."
    for table in (state_dict, versions):
        for key in [key for key in table if key.startswith(full)]:
            table[prefix + key.removeprefix(full)] = table.pop(key)


def _lengthen(
    owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any, name: str
) -> None:
    """Hook before `load_state_dict`."""
    submodule = owner.get_submodule(name)
    parts = {*submodule._modules, *submodule._buffers, *submodule._parameters}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        path = key.removeprefix(prefix)
        if path.partition(".")[0] in parts:
            state_dict[f"{prefix}{name}.{path}"] = state_dict.pop(key)
