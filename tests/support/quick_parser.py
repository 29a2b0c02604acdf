"""Parse command lines in two thirds of the time, for the thousand commands that run in the processes of tests.

jsonargparse looks for an option in the list of all, some thousand times a command, and splits its dotted names some ten
thousand times; Lightning reads the entry points of all installed packages for each Trainer. Each finds the same again.
"""

import sys
from collections import OrderedDict
from functools import cache
from typing import Any
from unittest.mock import patch

from jsonargparse import Namespace, _actions, _namespace, _subcommands
from lightning_fabric.utilities import registry

_KEPT = 64  # lists of actions


class _Index:
    """The actions of a parser by name, as `find_action_and_subcommand` of jsonargparse finds them."""

    def __init__(self, actions: list[Any], exclude: Any) -> None:
        self.actions = list(actions)
        found = [
            action
            for action in _actions.filter_non_parsing_actions(actions)
            if exclude is None or not isinstance(action, exclude)
        ]
        self.subcommands = [a for a in found if isinstance(a, _subcommands.ActionSubCommands)]
        self.by_name: dict[str, Any] = {}
        last_resort: dict[str, Any] = {}
        for action in found:
            names = [name.removeprefix("--") for name in action.option_strings if name[:2] == "--"]
            is_last = isinstance(action, (_actions._ActionConfigLoad, _actions.ActionFail))
            for name in {action.dest, *names}:
                if is_last:
                    last_resort[name] = action
                else:
                    self.by_name.setdefault(name, action)
        self.by_name = {**last_resort, **self.by_name}


_indices: OrderedDict[tuple[int, Any], tuple[list[Any], _Index]] = OrderedDict()


def _index_of(actions: list[Any], exclude: Any) -> _Index:
    key = (id(actions), exclude)
    kept = _indices.get(key)
    # the list itself is kept, so no other has its address; it may have got more actions meanwhile
    if kept is None or kept[0] is not actions or kept[1].actions != actions:
        kept = _indices[key] = (actions, _Index(actions, exclude))
        while len(_indices) > _KEPT:
            _indices.popitem(last=False)
    return kept[1]


def _find(parser: Any, dest: str, exclude: Any = None) -> tuple[Any, str | None]:
    index = _index_of(parser._actions, exclude)
    for action in index.subcommands:
        if dest in action._name_parser_map:
            return action, None
        root, _, rest = dest.partition(".")
        if root in action._name_parser_map:
            found, below = _find(action._name_parser_map[root], rest, exclude)
            return found, root if below is None else f"{root}.{below}"
    return index.by_name.get(dest), None


@cache
def _parts(key: str) -> list[str]:
    return [_namespace.add_clash_mark(part) for part in key.split(".")]


def _parse_key(self: Namespace, key: str) -> tuple[str, Any, str]:
    """Do what `Namespace._parse_key` does, which splits each key anew."""
    if not isinstance(key, str) or " " in key or "" in (parts := _parts(key)):
        return _ORIGINAL_PARSE_KEY(self, key)
    parent: Any = self
    for part in parts[:-1]:
        if not hasattr(parent, part) and not (isinstance(parent, dict) and part in parent):
            return parts[-1], None, ".".join(parts[:-1])
        parent = parent[part]
        if parent is not None and not isinstance(parent, (Namespace, dict)):
            return parts[-1], None, ".".join(parts[:-1])
    return parts[-1], parent, ".".join(parts[:-1])


_ORIGINAL_PARSE_KEY = Namespace._parse_key


def parse_quickly() -> None:
    """Let this process find options and entry points quickly."""
    original = _subcommands.find_action_and_subcommand
    for name, module in list(sys.modules.items()):
        if name.startswith("jsonargparse") and original in vars(module).values():
            patch.object(module, "find_action_and_subcommand", _find).start()
    patch.object(Namespace, "_parse_key", _parse_key).start()
    patch.object(registry, "entry_points", cache(registry.entry_points)).start()
