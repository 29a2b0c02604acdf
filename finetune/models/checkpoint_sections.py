"""The schema of our checkpoints: the keys of each section, and the type and range of each value.

A checkpoint may be untrusted. `check_checkpoint` is called wherever one is read, so that every command refuses the
same values. Settings have the types and ranges of `finetune.settings`, without those of the machine or the process
(`num_workers`, `cache_limit_gb`, devices), which a checkpoint must not set.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_args

from msgspec import Meta

from finetune.models.checkpoint_values import (
    Rule,
    are_class_names,
    are_dicts,
    are_loops,
    are_optimizer_states,
    are_train_metrics,
    check_section,
    format_value,
    is_class_weights,
    is_count,
    is_data_class,
    is_dense,
    is_interpolation,
    is_number,
    is_optional_text,
    is_plain,
    is_seen,
    is_text,
    one_of,
    refuse,
)
from finetune.settings.fields import Section, Setting, expected, settings_of
from finetune.settings.schema import (
    DATA_CLASSES,
    MAX_MEMBERS,
    DataSettings,
    ModelSettings,
    Pixels,
    Precision,
)
from finetune.system.messages import WrongUsage

REQUIRED_SECTIONS = frozenset(
    {"state_dict", "hyper_parameters", "datamodule_hyper_parameters", "finetune"}
)
# Settings that a checkpoint does not have: those of the machine or of a single command, and classes.
_MODEL_WITHOUT = frozenset({"optimizer", "scheduler", "compile"})
_DATA_WITHOUT = frozenset({"class_path", "num_workers", "cache_limit_gb", "class_names", "predict"})

_TEXT = Rule("text", is_text)
_OPTIONAL_TEXT = Rule("text or null", is_optional_text)
_COUNT = Rule("a whole number, at least 0", is_count)


def _rule(setting: Setting, is_required: bool) -> Rule:
    """Return the rule for a value of a setting, which has its type and range."""
    return Rule(
        expected(setting),
        lambda value: is_plain(value) and setting.accepts(value),
        is_required,
    )


def _rules(kind: type[Section], without: frozenset[str], *required: str) -> dict[str, Rule]:
    """Return the rules for the settings of a section that a checkpoint has."""
    return {
        name: _rule(setting, name in required)
        for name, setting in settings_of(kind).items()
        if name not in without and "." not in name
    }


# The arguments of `Classifier`, except those that are only in config.yaml.
HYPER_PARAMETERS = MappingProxyType(
    {
        **_rules(ModelSettings, _MODEL_WITHOUT, "backbone", "head_stages"),
        # as many as there are classes
        "class_weights": Rule("balanced, a weight for each class, or null", is_class_weights),
        # decided by the join of several fits
        "members": _rule(Setting("members", Annotated[int, Meta(ge=1, le=MAX_MEMBERS)], 1), True),
        # decided by the data
        "class_names": Rule(
            "at least two different names without control characters", are_class_names, True
        ),
        "network_size": _rule(Setting("network_size", Pixels | None, None), False),
        "label_kind": one_of("single", "several"),
    }
)

# The arguments of `ImageDataModule`, except those for the machine or for a single command.
DATAMODULE_HYPER_PARAMETERS = MappingProxyType(_rules(DataSettings, _DATA_WITHOUT, "image_size"))

# Written by `runs.checkpoint_facts.origin` and `Classifier.on_save_checkpoint`; for an exported file by `packed`.
FINETUNE = MappingProxyType(
    {
        "version": Rule("text", is_text, True),
        "torch": Rule("text", is_text, True),
        "precision": one_of(*get_args(Precision), None),
        "data_fingerprint": _TEXT,
        "seen": Rule("tensors train and val of 64-bit digests, or null", is_seen),
        "data_class": Rule(
            f"one of {', '.join(DATA_CLASSES)}, or a class of another module", is_data_class
        ),
        "began_from": _OPTIONAL_TEXT,
        "licence_of_the_weights": _OPTIONAL_TEXT,
        "train_metrics": Rule("four sums of loss and accuracy, or null", are_train_metrics),
        # `training.calibration.read_calibration` checks its values. Every reader calls that.
        "calibration": Rule(
            "a calibration, or null", lambda value: value is None or type(value) is dict
        ),
        "interpolation": Rule(
            "the weights that were chosen, or null", lambda v: v is None or is_interpolation(v)
        ),
    }
)

# The states of our callbacks that we read, by class.
CALLBACKS: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {
        "Checkpoints": {
            "highest": Rule(
                "a number from 0 to 1, or null",
                lambda value: value is None or is_number(value, 0, 1),
                True,
            ),
            "num_waited": _COUNT,
        },
    }
)

# Lightning's top-level keys that a Trainer or this package reads. No others are read.
LIGHTNING = MappingProxyType(
    {
        "epoch": _COUNT,
        "global_step": _COUNT,
        "pytorch-lightning_version": Rule(
            "a version",
            lambda value: is_text(value) and re.fullmatch(r"\d+\.\d+\S{,40}", value) is not None,
            True,
        ),
        "state_dict": Rule(
            "named dense tensors with values",
            lambda value: (
                isinstance(value, dict)
                and all(type(name) is str and is_dense(one) for name, one in value.items())
            ),
        ),
        "loops": Rule("the progress of Lightning's loops", are_loops),
        "callbacks": Rule(
            "a dict for each callback", lambda v: are_dicts([v]) and are_dicts([*v.values()])
        ),
        "optimizer_states": Rule(
            "a state with param_groups for each optimizer", are_optimizer_states
        ),
        "lr_schedulers": Rule("a dict for each scheduler", are_dicts),
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
    check_section(checkpoint["hyper_parameters"], HYPER_PARAMETERS, "hyper_parameters", file)
    check_section(checkpoint["finetune"], FINETUNE, "finetune", file)
    data = checkpoint["datamodule_hyper_parameters"]
    is_ours = checkpoint["finetune"].get("data_class") in (*DATA_CLASSES, None)
    check_section(
        data, DATAMODULE_HYPER_PARAMETERS, "datamodule_hyper_parameters", file, is_closed=is_ours
    )
    if not is_plain(
        {key: value for key, value in data.items() if key not in DATAMODULE_HYPER_PARAMETERS}
    ):
        refuse(
            file,
            "datamodule_hyper_parameters has too many values, or values that are not plain",
        )
    _check_fits_together(data, file)
    check_section(
        {name: checkpoint[name] for name in LIGHTNING.keys() & checkpoint.keys()},
        LIGHTNING,
        "",
        file,
    )
    _check_callbacks(checkpoint.get("callbacks", {}), file)
    _check_buffers(checkpoint, file)


def _check_fits_together(data: Mapping[str, Any], file: object) -> None:
    values = {name: value for name, value in data.items() if name in DATAMODULE_HYPER_PARAMETERS}
    try:
        DataSettings(**values)
    except WrongUsage as error:
        refuse(file, f"datamodule_hyper_parameters: {error}")


def _check_callbacks(callbacks: Mapping[str, Any], file: object) -> None:
    for key, state in callbacks.items():
        if key in CALLBACKS:
            check_section(state, CALLBACKS[key], f"callbacks.{key}", file)


def _check_buffers(checkpoint: Mapping[str, Any], file: object) -> None:
    """Check the buffers of the classifier: the normalization and the class weights."""
    state = checkpoint["state_dict"]
    num_classes = len(checkpoint["hyper_parameters"]["class_names"])
    shapes = {"mean": (3, 1, 1), "std": (3, 1, 1), "class_weight": (num_classes,)}
    for name, shape in shapes.items():
        values = state.get(name)
        if values is None:
            continue
        if not is_dense(values) or not values.is_floating_point() or tuple(values.shape) != shape:
            refuse(
                file,
                f"state_dict.{name} has the shape {tuple(values.shape)}, expected {shape} of floats",
            )
        if not bool(values.isfinite().all()) or (name == "std" and float(values.min()) <= 0):
            refuse(
                file,
                f"state_dict.{name} holds {format_value(values.flatten().tolist()[:5])}, expected usable numbers",
            )
