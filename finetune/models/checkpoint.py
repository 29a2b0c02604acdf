"""The schema of our checkpoints: the keys of each section, with a rule for each value.

A checkpoint may be untrusted. `check_checkpoint` is called wherever one is read, so that every command refuses the
same values. Settings have the types and ranges of `finetune.settings`, without those of the machine or the process
(`num_workers`, `cache_limit_gb`, devices), which a checkpoint must not set. Sizes and nesting depths are bounded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn

import torch
from msgspec import Meta
from torch import Tensor

from finetune.settings.fields import Section, Setting, expected, settings_of
from finetune.settings.schema import (
    DATA_CLASSES,
    MAX_MEMBERS,
    DataSettings,
    LabelKind,
    ModelSettings,
    NotNegative,
    Pixels,
    Precision,
)
from finetune.system.messages import WrongUsage, fault_of_names, shown

REQUIRED_SECTIONS = frozenset(
    {"state_dict", "hyper_parameters", "datamodule_hyper_parameters", "finetune"}
)
# Settings that a checkpoint does not have: those of the machine or of a single command, and classes.
_MODEL_WITHOUT = frozenset({"optimizer", "scheduler", "compile"})
_DATA_WITHOUT = frozenset({"class_path", "num_workers", "cache_limit_gb", "class_names", "predict"})
_PROGRESS = {"ready", "started", "processed", "completed"}  # counts of Lightning's loops
_MAX_CHARACTERS = 4096
_MAX_CLASSES = 1_000_000
# Limits of a nested value. A list that contains another list twice, which does the same, grows exponentially.
_MAX_VALUES = 20_000
_MAX_DEPTH = 30

Count = Annotated[int, Meta(ge=0, le=2**53)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Version = Annotated[str, Meta(pattern=r"\A\d+\.\d+\S{0,40}\Z")]


@dataclass(frozen=True)
class Rule:
    """The rule for a value.

    Attributes:
        expected: The permitted values in words, for the error message.
        accepts: Returns whether a value is permitted.
        is_required: Whether the key must be present.
    """

    expected: str
    accepts: Callable[[Any], bool]
    is_required: bool = False


def _of_type(kind: Any, words: str = "", is_required: bool = False) -> Rule:
    """Return the rule for plain values of a type."""
    setting = Setting("", kind, None)
    return Rule(
        words or expected(setting),
        lambda value: is_plain(value) and setting.accepts(value),
        is_required,
    )


def _of_settings(kind: type[Section], without: frozenset[str], *required: str) -> dict[str, Rule]:
    """Return the rules for the settings of a section that a checkpoint has."""
    return {
        name: _of_type(setting.type, is_required=name in required)
        for name, setting in settings_of(kind).items()
        if name not in without and "." not in name
    }


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
        elif type(inner) is str:
            if len(inner) > _MAX_CHARACTERS or "\0" in inner:
                return False
        elif inner is not None and type(inner) not in (int, float, bool):
            return False
    return True


def _are_class_names(value: Any) -> bool:
    if type(value) is not list or len(value) > _MAX_CLASSES:
        return False
    return all(type(name) is str for name in value) and not fault_of_names(value)


def _is_dense(value: Any) -> bool:
    """Return whether a value is a dense tensor with data. Sparse, quantized and `meta` tensors are not.

    Nor are expanded ones: with a stride of 0 a tensor in a small file has any number of values.
    """
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    if value.layout != torch.strided or value.is_quantized:
        return False
    return value.nbytes <= value.untyped_storage().nbytes()


def _is_seen(value: Any) -> bool:
    """Return whether a value has the form that `data.seen` writes."""
    if value is None:
        return True
    if type(value) is not dict or value.keys() != {"train", "val"}:
        return False
    return all(
        _is_dense(column) and column.ndim == 1 and column.dtype == torch.int64
        for column in value.values()
    )


def _is_familiarity(value: Any) -> bool:
    """Return whether a value has the form of `features.familiarity`: class means (K, D) and cosines (N,)."""
    if type(value) is not dict or value.keys() != {"means", "cosines"}:
        return value is None
    return all(
        _is_dense(one) and one.dtype == torch.float32 and one.ndim == ndim and one.isfinite().all()
        for one, ndim in ((value["means"], 2), (value["cosines"], 1))
    ) and bool(value["cosines"].numel())


def _are_train_metrics(value: Any) -> bool:
    """Return whether a value has the form of `TrainMetrics.sums`; None for an exported file."""
    return value is None or (
        _is_dense(value) and value.dtype == torch.float64 and value.shape == (4,)
    )


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(name) is str and _is_dense(one) for name, one in value.items()
    )


def _are_loops(value: Any) -> bool:
    """Return whether a value is the progress of Lightning's loops: nested counts."""
    if type(value) is not dict or not is_plain(value):
        return False
    count = Setting("", Count, None)
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if not all(count.accepts(part[name]) for name in _PROGRESS & part.keys()):
            return False
        waiting += [inner for inner in part.values() if type(inner) is dict]
    try:
        return "processed" in value["fit_loop"]["epoch_progress"]["current"]
    except (KeyError, TypeError):
        return False


def _are_optimizer_states(value: Any) -> bool:
    return type(value) is list and all(map(_is_optimizer_state, value))


def _is_optimizer_state(value: Any) -> bool:
    if type(value) is not dict:
        return False
    groups = value.get("param_groups")
    state = value.get("state", {})
    if not _are_dicts(groups) or not groups or type(state) is not dict:
        return False
    own = [
        one
        for values in state.values()
        for one in (values.values() if type(values) is dict else [values])
    ]
    return all(_is_dense(one) for one in own if isinstance(one, Tensor))


def _are_dicts(value: Any) -> bool:
    return type(value) is list and all(
        type(one) is dict and all(type(key) is str for key in one) for one in value
    )


def _is_data_class(value: Any) -> bool:
    is_ours = type(value) is str and value.rpartition(".")[0] == "finetune"
    return is_plain(value) and type(value) is str and (not is_ours or value in DATA_CLASSES)


_CLASS_WEIGHTS = Setting("", dict[str, NotNegative] | Literal["balanced"] | None, None)

# The arguments of `Classifier`, except those that are only in config.yaml.
HYPER_PARAMETERS = MappingProxyType(
    {
        **_of_settings(ModelSettings, _MODEL_WITHOUT, "backbone", "head_stages"),
        # as many as there are classes
        "class_weights": Rule("balanced, a weight for each class, or null", _CLASS_WEIGHTS.accepts),
        # decided by the join of several fits
        "members": _of_type(Annotated[int, Meta(ge=1, le=MAX_MEMBERS)], is_required=True),
        # decided by the data
        "class_names": Rule(
            "at least two different names without control characters", _are_class_names, True
        ),
        "network_size": _of_type(Pixels | None),
        "label_kind": _of_type(LabelKind),
    }
)

# The arguments of `ImageDataModule`, except those for the machine or for a single command.
DATAMODULE_HYPER_PARAMETERS = MappingProxyType(
    _of_settings(DataSettings, _DATA_WITHOUT, "image_size")
)

# Written by `runs.checkpoint_facts.origin` and `Classifier.on_save_checkpoint`; for an exported file by `packed`.
FINETUNE = MappingProxyType(
    {
        "version": _of_type(str, "text", is_required=True),
        "torch": _of_type(str, "text", is_required=True),
        "precision": _of_type(Precision | None),
        "data_fingerprint": _of_type(str, "text"),
        "seen": Rule("tensors train and val of 64-bit digests, or null", _is_seen),
        "data_class": Rule(
            f"one of {', '.join(DATA_CLASSES)}, or a class of another module", _is_data_class
        ),
        "began_from": _of_type(str | None, "text or null"),
        "licence_of_the_weights": _of_type(str | None, "text or null"),
        "train_metrics": Rule("four sums of loss and accuracy, or null", _are_train_metrics),
        # `training.calibration.read_calibration` checks its values. Every reader calls that.
        "calibration": Rule(
            "a calibration, or null", lambda value: value is None or type(value) is dict
        ),
        "familiarity": Rule("class means and cosines, or null", _is_familiarity),
    }
)

# The states of our callbacks that we read, by class.
CALLBACKS: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {
        "Checkpoints": {
            "highest": _of_type(Unit | None, "a number from 0 to 1, or null", True),
            "num_waited": _of_type(Count),
        },
    }
)

# Lightning's top-level keys that a Trainer or this package reads. No others are read.
LIGHTNING = MappingProxyType(
    {
        "epoch": _of_type(Count),
        "global_step": _of_type(Count),
        "pytorch-lightning_version": _of_type(Version, "a version", True),
        "state_dict": Rule("named dense tensors with values", _is_state_dict),
        "loops": Rule("the progress of Lightning's loops", _are_loops),
        "callbacks": Rule(
            "a dict for each callback", lambda v: _are_dicts([v]) and _are_dicts([*v.values()])
        ),
        "optimizer_states": Rule(
            "a state with param_groups for each optimizer", _are_optimizer_states
        ),
        "lr_schedulers": Rule("a dict for each scheduler", _are_dicts),
    }
)


def check_checkpoint(checkpoint: Mapping[str, Any], file: object) -> None:
    """Check that a checkpoint has only keys and values that `finetune fit` writes.

    Args:
        checkpoint: A checkpoint with all `REQUIRED_SECTIONS`.
        file: Its file, for the error message.

    Raises:
        ValueError: A key is unknown, or a value has a wrong type or range. The message names section and key.
    """
    _check_section(checkpoint["hyper_parameters"], HYPER_PARAMETERS, "hyper_parameters", file)
    _check_section(checkpoint["finetune"], FINETUNE, "finetune", file)
    data = checkpoint["datamodule_hyper_parameters"]
    is_ours = checkpoint["finetune"].get("data_class") in (*DATA_CLASSES, None)
    _check_section(
        data, DATAMODULE_HYPER_PARAMETERS, "datamodule_hyper_parameters", file, is_closed=is_ours
    )
    own = {name: value for name, value in data.items() if name in DATAMODULE_HYPER_PARAMETERS}
    if not is_plain({name: value for name, value in data.items() if name not in own}):
        refuse(
            file,
            "datamodule_hyper_parameters has too many values, or values that are not plain",
        )
    try:
        DataSettings(**own)
    except WrongUsage as error:  # values that do not fit together
        refuse(file, f"datamodule_hyper_parameters: {error}")
    lightning = {name: checkpoint[name] for name in LIGHTNING.keys() & checkpoint.keys()}
    _check_section(lightning, LIGHTNING, "", file)
    for key, state in checkpoint.get("callbacks", {}).items():
        if key in CALLBACKS:
            _check_section(state, CALLBACKS[key], f"callbacks.{key}", file)
    _check_buffers(checkpoint, file)


def _check_section(
    values: Any, rules: Mapping[str, Rule], section: str, file: object, is_closed: bool = True
) -> None:
    """Check the values of a section. Keys without a rule are an error if the section is closed."""
    if not isinstance(values, dict):
        refuse(file, f"{section} is {_in_words(values)}, expected a dict")
    inside = f"{section}." if section else ""
    for key in [*values, *(name for name, rule in rules.items() if rule.is_required)]:
        name = f"{inside}{shown(key)[:80]}"
        if key not in values:
            refuse(file, f"{name} is missing")
        if key in rules:
            rule = rules[key]
            if not rule.accepts(values[key]):
                refuse(file, f"{name} is {_in_words(values[key])}, expected {rule.expected}")
        elif is_closed:
            refuse(file, f"{name} is an unknown key: update finetune, if a newer version wrote it")


def _check_buffers(checkpoint: Mapping[str, Any], file: object) -> None:
    """Check the buffers of the classifier: the normalization and the class weights."""
    state = checkpoint["state_dict"]
    num_classes = len(checkpoint["hyper_parameters"]["class_names"])
    shapes = {"mean": (3, 1, 1), "std": (3, 1, 1), "class_weight": (num_classes,)}
    for name, shape in shapes.items():
        values = state.get(name)
        if values is None:
            continue
        if not values.is_floating_point() or tuple(values.shape) != shape:
            refuse(
                file,
                f"state_dict.{name} has the shape {tuple(values.shape)}, expected {shape} of floats",
            )
        if not bool(values.isfinite().all()) or (name == "std" and float(values.min()) <= 0):
            refuse(
                file,
                f"state_dict.{name} holds {_in_words(values.flatten().tolist()[:5])}, expected usable numbers",
            )


def _in_words(value: Any) -> str:
    """Format a value for an error message: short values without control characters, others as their type."""
    plain = (int, float, str)
    if value is None or type(value) in (*plain, bool):
        return shown(repr(value))[:80]
    if (
        type(value) in (list, tuple)
        and len(value) <= 5
        and all(type(one) in plain for one in value)
    ):
        return shown(repr(value))[:120]
    return f"of type {type(value).__name__}"


def refuse(file: object, problem: str) -> NoReturn:
    """Raise the error for an invalid checkpoint."""
    raise ValueError(f"{str(file)!r} is not a valid checkpoint: {problem}")
