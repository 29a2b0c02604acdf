"""torchmetrics without scipy.signal, whose import takes longer than Lightning's own and of which it needs nothing.

It looks there for a name that an old package of others misses (torchmetrics 1.9, `__init__.py`). While it is imported
an empty module stands in; whoever asks for scipy.signal later gets the real one.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PATCHED, _NEEDLESS = "torchmetrics", "scipy.signal"


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None or _NEEDLESS in sys.modules:
            return spec
        execute = spec.loader.exec_module

        def execute_without(module: ModuleType) -> None:
            stand_in: Any = ModuleType(_NEEDLESS)
            stand_in.hamming = None  # what is looked for
            sys.modules[_NEEDLESS] = stand_in
            try:
                execute(module)
            finally:
                if sys.modules.get(_NEEDLESS) is stand_in:
                    del sys.modules[_NEEDLESS]

        spec.loader.exec_module = execute_without  # type: ignore[method-assign]
        return spec


def import_less() -> None:
    """See to it that what is imported from now on brings less."""
    if _PATCHED not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
