"""torchmetrics without scipy.signal, whose import takes longer than Lightning's own, and without matplotlib.

It looks in the first for a name that an old package of others misses (torchmetrics 1.9, `__init__.py`), and needs the
second to draw metrics, which no command of ours does. While it is imported empty modules stand in; whoever asks for
these later gets the real ones.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

_PATCHED = "torchmetrics"


class _Finder(MetaPathFinder):
    has_plots = True

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute, has_plots = spec.loader.exec_module, self.has_plots

        def execute_without(module: ModuleType) -> None:
            stand_ins = _stand_ins(has_plots)
            sys.modules.update(stand_ins)
            try:
                execute(module)
            finally:
                for name, stand_in in stand_ins.items():
                    if sys.modules.get(name) is stand_in:
                        del sys.modules[name]

        spec.loader.exec_module = execute_without  # type: ignore[method-assign]
        return spec


def import_less(has_plots: bool = True) -> None:
    """See to it that what is imported from now on brings less.

    Args:
        has_plots: Whether somebody may call a metric's `plot`.
    """
    if _PATCHED in sys.modules:
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _Finder())
    finder.has_plots = has_plots


def _stand_ins(has_plots: bool) -> dict[str, ModuleType]:
    """Return what torchmetrics finds instead of what is not imported yet, with all that it looks for in it."""
    found = {"scipy.signal": _module("scipy.signal", hamming=None)}
    if not has_plots and "matplotlib" not in sys.modules:
        style = SimpleNamespace(context=lambda _: lambda function: function)
        found["matplotlib.axes"] = axes = _module("matplotlib.axes", Axes=object)
        found["matplotlib.pyplot"] = _module("matplotlib.pyplot", Figure=object, style=style)
        found["matplotlib"] = _module(
            "matplotlib", axes=axes, colors=SimpleNamespace(Colormap=object)
        )
    return {name: module for name, module in found.items() if name not in sys.modules}


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module
