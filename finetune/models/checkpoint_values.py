"""Rules for the values of a checkpoint, and a function that checks a section by a table of rules.

Each kind of value has one predicate. Types must match exactly. Sizes and nesting depths are bounded.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import yaml
from torch import Tensor

from finetune.settings.schema import DATA_CLASSES
from finetune.system.messages import fault_of_names, shown

_MAX_CANDIDATES = 100  # interpolated weights among which a fit chooses
MAX_COUNT = 2**53
_MAX_CHARACTERS = 4096
_MAX_LISTED = 1_000_000  # class names
# Limits of a nested value. A list that contains another list twice, which does the same, grows exponentially.
_MAX_VALUES = 20_000
_MAX_DEPTH = 30
_PROGRESS = {"ready", "started", "processed", "completed"}


@dataclass(frozen=True)
class Rule:
    """The rule for a value.

    Attributes:
        expected: The permitted values in words, for the error message.
        accepts: Returns whether a value is permitted.
        is_required: Whether the key must be present. True if every version has written it.
    """

    expected: str
    accepts: Callable[[Any], bool]
    is_required: bool = False


def one_of(*values: str | None) -> Rule:
    """Return the rule for a value that must be one of these."""
    words = " or ".join("null" if value is None else value for value in values)
    return Rule(words, lambda value: type(value) in (str, type(None)) and value in values)


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value is a finite number from `least` to `most`, and not a bool."""
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def is_plain(value: Any) -> bool:
    """Return whether a nested value consists of dicts with text keys, lists, tuples, numbers, text, bools and None.

    A value that is nested too deeply or too large is not plain. A part that occurs several times counts each time.
    """
    waiting = [(value, 0)]
    num = 0
    while waiting:
        inner, depth = waiting.pop()
        num += 1
        if num + len(waiting) > _MAX_VALUES or depth > _MAX_DEPTH:
            return False
        if type(inner) is dict:
            if not all(type(key) is str for key in inner):
                return False
            waiting += [(one, depth + 1) for one in inner.values()]
        elif type(inner) in (list, tuple):
            waiting += [(one, depth + 1) for one in inner]
        elif inner is not None and type(inner) not in (int, float, bool) and not is_text(inner):
            return False
    return True


def are_class_names(value: Any) -> bool:
    """Return whether a value is a valid list of class names."""
    if type(value) not in (list, tuple) or len(value) > _MAX_LISTED:
        return False
    return all(type(name) is str for name in value) and not fault_of_names(value)


def is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_CHARACTERS and "\0" not in value


def is_optional_text(value: Any) -> bool:
    return value is None or is_text(value)


def is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> bool:
    return type(value) is int and least <= value <= most


def is_dense(value: Any) -> bool:
    """Return whether a value is a dense tensor with data. Sparse, quantized and `meta` tensors are not."""
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return value.layout == torch.strided and not value.is_quantized


def is_class_weights(value: Any) -> bool:
    """Return whether a value is `balanced`, a weight for each class by its name, or None."""
    if type(value) is not dict:
        return value is None or (type(value) is str and value == "balanced")
    return len(value) <= _MAX_LISTED and all(
        is_text(name) and is_number(weight, 0, math.inf) for name, weight in value.items()
    )


def is_data_class(value: Any) -> bool:
    if not is_text(value):
        return False
    module = value.rpartition(".")[0]
    return module != "finetune" or value in DATA_CLASSES


def is_seen(value: Any) -> bool:
    """Return whether a value has the form that `data.seen` writes."""
    if value is None:
        return True
    if type(value) is not dict or value.keys() != {"train", "val"}:
        return False
    return all(
        is_dense(column) and column.ndim == 1 and column.dtype == torch.int64
        for column in value.values()
    )


def are_train_metrics(value: Any) -> bool:
    """Return whether a value has the form of `TrainMetrics.sums`; None for an exported file."""
    return value is None or (
        is_dense(value) and value.dtype == torch.float64 and value.shape == (4,)
    )


def is_interpolation(value: Any) -> bool:
    """Return whether a value is a record of `training.best_weights.settle`."""
    if type(value) is not dict or value.keys() != {"share", "num_images", "candidates"}:
        return False
    candidates = value["candidates"]
    if type(candidates) is not list or not 2 <= len(candidates) <= _MAX_CANDIDATES:
        return False
    # the mean average precision if images have several labels
    metric = "mAP" if type(candidates[0]) is dict and "mAP" in candidates[0] else "accuracy"
    if not all(type(one) is dict and one.keys() == {"share", "loss", metric} for one in candidates):
        return False
    numbers = all(
        is_number(one["share"], 0, 1)
        and is_number(one[metric], 0, 1)
        and is_number(one["loss"], 0, math.inf)
        for one in candidates
    )
    shares = [one["share"] for one in candidates]
    has_both_ends = numbers and min(shares) == 0 and max(shares) == 1
    return has_both_ends and value["share"] in shares and is_count(value["num_images"], 1)


def are_loops(value: Any) -> bool:
    """Return whether a value is the progress of Lightning's loops: nested counts."""
    if type(value) is not dict or not is_plain(value):
        return False
    try:
        processed = value["fit_loop"]["epoch_progress"]["current"]["processed"]
    except (KeyError, TypeError):
        return False
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if any(not is_count(part[name]) for name in _PROGRESS & part.keys()):
            return False
        waiting += [inner for inner in part.values() if type(inner) is dict]
    return is_count(processed)


def are_optimizer_states(value: Any) -> bool:
    return type(value) is list and all(map(_is_optimizer_state, value))


def _is_optimizer_state(value: Any) -> bool:
    if type(value) is not dict:
        return False
    groups = value.get("param_groups")
    state = value.get("state", {})
    if not are_dicts(groups) or not groups or type(state) is not dict:
        return False
    own = [
        one
        for values in state.values()
        for one in (values.values() if type(values) is dict else [values])
    ]
    return all(is_dense(one) for one in own if isinstance(one, Tensor))


def are_dicts(value: Any) -> bool:
    return type(value) is list and all(
        type(one) is dict and all(type(key) is str for key in one) for one in value
    )


def check_section(
    values: Any, rules: Mapping[str, Rule], section: str, file: object, is_closed: bool = True
) -> None:
    """Check the values of a section. Keys without a rule are an error if the section is closed."""
    if not isinstance(values, dict):
        refuse(file, f"{section} is {format_value(values)}, expected a dict")
    inside = f"{section}." if section else ""
    for key in [*values, *(name for name, rule in rules.items() if rule.is_required)]:
        name = f"{inside}{shown(key)[:80]}"
        if key not in values:
            refuse(file, f"{name} is missing")
        if key in rules:
            rule = rules[key]
            if not rule.accepts(values[key]):
                refuse(file, f"{name} is {format_value(values[key])}, expected {rule.expected}")
        elif is_closed:
            refuse(file, f"{name} is an unknown key: update finetune, if a newer version wrote it")


def format_value(value: Any) -> str:
    """Format a value for an error message: short values without control characters, others as their type."""
    if value is None or type(value) in (int, float, str, bool):
        return shown(repr(value))[:80]
    if (
        type(value) in (list, tuple)
        and len(value) <= 5
        and all(type(one) in (int, float, str) for one in value)
    ):
        return shown(repr(value))[:120]
    return f"of type {type(value).__name__}"


def refuse(file: object, problem: str) -> NoReturn:
    """Raise the error for an invalid checkpoint."""
    raise ValueError(f"{str(file)!r} is not a valid checkpoint: {problem}")


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
