"""Which argument of `finetune.fit` was probably meant: the hints of the command line, for Python's own error."""

import inspect
from collections.abc import Callable, Container
from functools import wraps
from typing import ParamSpec, TypeVar

from finetune.commands.options import OPTIONS, WORDS
from finetune.commands.suggestions import nearest_flag

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_hints(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let Python's error of an unknown argument name the argument that was probably meant."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                # Python's own words
                told = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{told}{_hint(name, known)}")
        return function(*args, **kwargs)

    return checked


def _hint(name: str, known: Container[str]) -> str:
    """Return the end of a message about an argument that is not among the known ones."""
    if name in ("data", "root", "path"):
        return "; did you mean 'folder'?"
    full = "model.backbone" if name == "model" else nearest_flag(name, WORDS["fit"], OPTIONS["fit"])
    if full is None:
        return "; help(finetune.fit) lists the arguments"
    word = next((word for word, meant in WORDS["fit"].items() if meant == full), full)
    return (
        f"; did you mean {word!r}?" if word in known else f"; did you mean options={{{full!r}: …}}?"
    )
