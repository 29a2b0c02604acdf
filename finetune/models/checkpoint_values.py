"""Rules for the values of a checkpoint, and checking a section by a table of them.

There is one predicate for each kind of value. Types are exact, and sizes and nesting are bounded.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import yaml
from torch import Tensor

from finetune.system.messages import fault_of_names, shown

# Our data classes. Another one is imported only if the user names it, and has arguments of its own.
DATA_CLASSES = (
    "finetune.FashionMNIST",
    "finetune.Hotdog",
    "finetune.ImageFolderData",
    "finetune.SampleData",
)
EARLIER_DATA_CLASSES = tuple(
    name.replace("finetune.", "finetune.datamodules.") for name in DATA_CLASSES
)
# of a side of the images that a network takes: of larger ones no batch has room
LEAST_PIXELS, MOST_PIXELS = 8, 8192
MOST_RESIZED = 2**14  # of a side before the centre is cropped
_MOST_CANDIDATES = 100  # weights among which a fit chooses
LEAST_CROP_SHARE = 0.1
MOST_IN_A_BATCH = 2**20
MOST_AUGMENTATIONS = 100
MOST_EXCLUDED = 10_000
_MOST_CHARACTERS = 4096
_MOST_LISTED = 1_000_000  # class names, and categories of a class mapping
# Of a nested value: a list may hold another one twice, and that a third one. Each transform in it takes time per image.
_MOST_VALUES, _MOST_DEPTH = 10_000, 30
_PROGRESS = {"ready", "started", "processed", "completed"}


@dataclass(frozen=True)
class Rule:
    """What a value may be.

    Attributes:
        expected: In words, for the error message.
        accepts: Whether a value is one of these.
        is_required: Whether every version has written the key.
    """

    expected: str
    accepts: Callable[[Any], bool]
    is_required: bool = False


def one_of(*values: str | None) -> Rule:
    words = " or ".join("null" if value is None else value for value in values)
    return Rule(words, lambda value: type(value) in (str, type(None)) and value in values)


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value is a finite number from `least` to `most`, and no bool."""
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def is_plain(value: Any) -> bool:
    """Return whether a nested value holds only dicts with text as keys, lists, tuples, numbers, text, bools and None.

    One that is very deep, or very large where each appearance of a shared part counts, is not.
    """
    waiting = [(value, 0)]
    num = 0
    while waiting:
        inner, depth = waiting.pop()
        num += 1
        if num + len(waiting) > _MOST_VALUES or depth > _MOST_DEPTH:
            return False
        if type(inner) is dict:
            if not all(type(key) is str for key in inner):
                return False
            waiting += [(one, depth + 1) for one in inner.values()]
        elif type(inner) in (list, tuple):
            waiting += [(one, depth + 1) for one in inner]
        elif inner is not None and type(inner) not in (str, int, float, bool):
            return False
    return True


def are_class_names(value: Any) -> bool:
    """Return whether a value is what a classifier's classes may be called."""
    if type(value) not in (list, tuple) or len(value) > _MOST_LISTED:
        return False
    return all(type(name) is str for name in value) and not fault_of_names(value)


def are_names(value: Any) -> bool:
    """Return whether a value is text, a list of texts, or None."""
    return is_optional_text(value) or (
        type(value) is list and len(value) <= MOST_EXCLUDED and all(map(is_text, value))
    )


def are_augmentations(value: Any) -> bool:
    """Return whether a value is a list of transforms, or None; `commands.trust` checks the classes that it names."""
    return value is None or (
        are_dicts(value) and len(value) <= MOST_AUGMENTATIONS and is_plain(value)
    )


def is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MOST_CHARACTERS and "\0" not in value


def is_optional_text(value: Any) -> bool:
    return value is None or is_text(value)


def is_side(value: Any) -> bool:
    return is_count(value, LEAST_PIXELS, MOST_PIXELS)


def is_count(value: Any, least: int = 0, most: int = 2**53) -> bool:
    return type(value) is int and least <= value <= most


def is_dense(value: Any) -> bool:
    """Return whether a value is a tensor with all its numbers; those on the device `meta` have a shape only."""
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return value.layout == torch.strided and not value.is_quantized


def is_class_mapping(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not dict or not all(is_text(key) for key in value):
        return False
    lists = [one if type(one) is list else [one] for one in value.values()]
    return sum(map(len, lists)) <= _MOST_LISTED and all(
        is_text(one) for listed in lists for one in listed
    )


def is_schedule(value: Any) -> bool:
    return is_optional_text(value) or (
        type(value) is list and len(value) <= 1000 and all(map(is_side, value))
    )


def is_data_class(value: Any) -> bool:
    if not is_text(value):
        return False
    return not value.startswith("finetune.") or value in (*DATA_CLASSES, *EARLIER_DATA_CLASSES)


def is_seen(value: Any) -> bool:
    """Return whether a value is as `data.seen_record` packs it; earlier versions had no digests."""
    if value is None:
        return True
    if type(value) is not dict or value.keys() - {"digests"} != {"names", "sizes", "num_train"}:
        return False
    names, sizes = value["names"], value["sizes"]
    columns = [names, sizes, value.get("digests", names)]
    if not all(is_dense(column) and column.ndim == 1 for column in columns):
        return False
    if [column.dtype for column in columns] != [torch.int64, torch.int32, torch.int64]:
        return False
    return len({len(column) for column in columns}) == 1 and is_count(
        value["num_train"], most=len(names)
    )


def are_train_metrics(value: Any) -> bool:
    """Return whether a value is as `TrainMetrics.sums` gives it; an exported file has none."""
    expected = {"train_loss": {"sum", "weight"}, "train_accuracy": {"tp", "fp", "tn", "fn"}}
    if value == {}:
        return True
    if type(value) is not dict or value.keys() != expected.keys():
        return False
    if any(
        type(value[name]) is not dict or value[name].keys() != names
        for name, names in expected.items()
    ):
        return False
    sums = [one for state in value.values() for one in state.values()]
    return all(is_dense(one) and one.numel() == 1 for one in sums)


def is_early_best_score(value: Any) -> bool:
    if value is None:
        return True
    return (
        type(value) in (list, tuple)
        and len(value) == 2
        and all(is_number(one, -math.inf, math.inf) for one in value)
    )


def is_interpolation(value: Any) -> bool:
    """Return whether a value is what `training.interpolation.Interpolation.as_plain` returns."""
    if type(value) is not dict or value.keys() != {"share", "num_images", "candidates"}:
        return False
    candidates = value["candidates"]
    if type(candidates) is not list or not 2 <= len(candidates) <= _MOST_CANDIDATES:
        return False
    if not all(
        type(one) is dict and one.keys() == {"share", "loss", "accuracy"} for one in candidates
    ):
        return False
    numbers = all(
        is_number(one["share"], 0, 1)
        and is_number(one["accuracy"], 0, 1)
        and is_number(one["loss"], 0, math.inf)
        for one in candidates
    )
    shares = [one["share"] for one in candidates]
    has_both_ends = numbers and min(shares) == 0 and max(shares) == 1
    return has_both_ends and value["share"] in shares and is_count(value["num_images"], 1)


def are_limits(value: Any) -> bool:
    return value is None or (type(value) is dict and is_plain(value))


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
    groups, state = value.get("param_groups"), value.get("state", {})
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
    """Check the values of a section; one that is not closed may have more keys."""
    if not isinstance(values, dict):
        refuse(file, f"{section} is {worded(values)}, expected a dict")
    inside = f"{section}." if section else ""
    for key in [*values, *(name for name, rule in rules.items() if rule.is_required)]:
        name = f"{inside}{shown(key)[:80]}"
        if key not in values:
            refuse(file, f"{name} is missing")
        if key in rules:
            rule = rules[key]
            if not rule.accepts(values[key]):
                refuse(file, f"{name} is {worded(values[key])}, expected {rule.expected}")
        elif is_closed:
            refuse(file, f"{name} is an unknown key; only a newer finetune may have written it")


def worded(value: Any) -> str:
    """Return a value for an error message: short ones as they are, without control characters."""
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
    """Raise the one line in which a checkpoint is refused."""
    raise ValueError(f"{str(file)!r} is not a valid checkpoint: {problem}")


def class_paths(value: Any) -> Iterator[Any]:
    """Yield every class path in nested values, and in text that a parser would take for such."""
    if isinstance(value, str):
        # of 4006-38-13, and of !!bool x
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
