"""The value of `--class_weights`: `balanced`, or a weight for each class, from text or a file."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.settings.configs import load
from finetune.system.file_names import composed
from finetune.system.messages import NotFound, WrongUsage, did_you_mean

BALANCED = "balanced"
# A weight other than 0 is within these bounds, in which float32 computes losses without overflow.
_LEAST = 1e-6
_MOST = 1e6
_FORMS = "balanced, text such as 'cat:2,dog:0.5', or a .yaml file"
_OF_FILES = "put weights of classes whose names contain : or , into a .yaml file"


def parse_class_weights(value: Mapping[str, Any] | str | None) -> dict[str, float] | str | None:
    """Return the weights that an option gives by class name; `balanced` and None as they are.

    Args:
        value: A mapping; `balanced`; text such as `cat:2,dog:0.5`; or the path of a .yaml file with a mapping.

    Raises:
        WrongUsage: The value has another form, a class occurs twice, a weight is invalid, or the file cannot be read.
    """
    if value is None or value == BALANCED:
        return value
    if isinstance(value, Mapping):
        return _checked(value.items(), "class_weights")
    text = value.strip()
    if text.lower().endswith(".yaml"):
        path = Path(os.path.expanduser(text))
        if not path.is_file():
            raise NotFound(f"class_weights: there is no file {path}")
        weights = load(path, "file of --class_weights", "weights such as `cat: 2`")
        return _checked(weights.items(), f"class_weights {path}")
    if ":" not in text:
        raise WrongUsage(f"class_weights cannot be {text!r}; it takes {_FORMS}")
    pairs = [part.partition(":") for part in text.split(",")]
    for name, colon, weight in pairs:
        if not name.strip() or not weight.strip() or ":" in weight:
            part = f"{name}{colon}{weight}".strip()
            raise WrongUsage(f"class_weights: {part!r} is not CLASS:WEIGHT; {_OF_FILES}")
    return _checked([(name.strip(), weight) for name, _, weight in pairs], "class_weights")


def weights_of_classes(weights: Mapping[str, float], class_names: Sequence[str]) -> list[float]:
    """Return the weight of each class; 1 for classes that are not named.

    Raises:
        WrongUsage: A class does not exist.
    """
    known = set(map(composed, class_names))
    for name in weights:
        if name not in known:
            hint = did_you_mean(name, class_names)
            raise WrongUsage(f"class_weights: there is no class {name!r}{hint}")
    in_order = [weights.get(composed(name), 1.0) for name in class_names]
    if not any(in_order):
        raise WrongUsage("class_weights: the weights of all classes are 0")
    return in_order


def check_weighted(
    weights: Mapping[str, float], class_names: Sequence[str], counts: Mapping[str, Any]
) -> None:
    """Check that each split has images of a class whose weight is not 0. Its mean loss is not defined otherwise.

    Args:
        weights: The weights by class.
        class_names: The K classes, in order.
        counts: For each split the number of its images per class, (K,).

    Raises:
        WrongUsage: A split has none.
    """
    in_order = weights_of_classes(weights, class_names)
    for split, numbers in counts.items():
        if not any(num and weight for num, weight in zip(numbers, in_order, strict=True)):
            raise WrongUsage(f"class_weights: all images of {split} are of classes with weight 0")


def _checked(pairs: Iterable[tuple[str, Any]], source: str) -> dict[str, float]:
    """Return the weights by class.

    Raises:
        WrongUsage: A class occurs twice, or a weight is invalid, or there are none.
    """
    weights: dict[str, float] = {}
    for original, value in pairs:
        name = composed(str(original))
        if name in weights:
            raise WrongUsage(f"{source}: the class {name!r} occurs twice")
        try:
            weight = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            weight = math.nan
        if weight != 0 and not _LEAST <= weight <= _MOST:
            usual = f"0 or a number from {_LEAST:f} to {_MOST:,.0f}"
            raise WrongUsage(f"{source}: the weight of {name!r} must be {usual}, not {value!r}")
        weights[name] = abs(weight)  # not -0.0
    if not weights:
        raise WrongUsage(f"{source}: there are no classes; it takes {_FORMS}")
    return weights
