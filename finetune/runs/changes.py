"""What a run is resumed with against its config.yaml: some of it may not change, some the checkpoint decides."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

# Another order of the pictures is another run.
_ORDER = ("seed_everything", "data.batch_size")
_PICTURES = ("data.root", "data.val_fraction", "data.test_fraction", "data.split_seed")
# With another of these the optimizer's state would not fit.
_FIXED = (
    *(
        "model.backbone",
        "model.members",
        "model.freeze",
        "model.layer_decay",
        "model.decay_norm_and_bias",
    ),
    *("model.optimizer.class_path", "model.scheduler.class_path"),
)
# what the config.yaml of an earlier version does not say, as it was then
_SINCE = {"model.members": 1}
# What was used at the beginning only, or lies in the checkpoint.
_HELD = (
    *("model.optimizer.", "model.scheduler.", "model.head_lr_multiplier", "model.class_weights"),
    *("model.weights", "model.head_init", "model.source_classes", "model.class_mapping"),
    "threshold",  # best.ckpt may have one already
)
_LENGTH = ("trainer.max_epochs", "trainer.max_steps", "trainer.limit_train_batches")
_OF_TEST = ("trainer.limit_test_batches", "trainer.precision")
# What changes no result: where and how fast it runs, what it shows.
_FREE = (
    *(
        "resume",
        "ckpt_path",
        "allow_changes",
        "test_after_fit",
        "name",
        "keep_last",
        "checkpoint_every_n_steps",
        "model.compile",
    ),
    *("data.num_workers", "data.cache_limit_gb", "data.predict", "data.root"),
    *(
        "trainer.accelerator",
        "trainer.strategy",
        "trainer.devices",
        "trainer.num_nodes",
        "trainer.default_root_dir",
    ),
    *(
        "trainer.logger",
        "trainer.log_every_n_steps",
        "trainer.enable_",
        "trainer.plugins",
        "trainer.profiler",
    ),
)


def compared(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    has_other_pictures: bool,
    allow: bool,
    is_finished: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Return what to tell of the differences, "" for nothing, and the values that hold instead of those given now.

    Args:
        before: What the run's config.yaml says; nothing where it is gone.
        now: The same of this command.
        has_other_pictures: Whether the training pictures are others.
        allow: Whether the order of the pictures may change.
        is_finished: Whether the run has nothing left to do, so that no other setting of data or model can be applied.

    Raises:
        ValueError: Something differs that can't, or that nobody asked for.
    """
    old, new = ({**_SINCE, **dict(_flat(config))} for config in (before or now, now))
    # Options of one class alone are told by the names of the classes.
    differing = [key for key in {**old, **new} if key in _FIXED or (key in old and key in new)]
    differing = [key for key in differing if old.get(key) != new.get(key)]
    values = {_flag(key): (old.get(key), new.get(key)) for key in differing}
    is_one = old.get("model.members") == 1  # else no other begins with it
    hint = "may start from what it learned: --model.weights LAST.CKPT" if is_one else "begins"
    if fixed := {key: value for key, value in values.items() if key in _FIXED}:
        raise ValueError(
            f"the run can't go on with {_told(fixed)}; a new run {hint} without --resume"
        )
    longer = {key: value for key, value in values.items() if key in _LENGTH and _is_longer(*value)}
    own_length = [
        old.get(f"model.scheduler.init_args.{name}") for name in ("total_steps", "epochs")
    ]
    if (
        longer
        and str(old.get("model.scheduler.class_path")).endswith("OneCycleLR")
        and not any(own_length)
    ):
        raise ValueError(
            f"the run can't go on with {_told(longer)}, since OneCycleLR ends with the length that it began with: "
            f"leave that as it was; a new run {hint} without --resume"
        )
    order = {
        k: v for k, v in values.items() if k in _ORDER or (has_other_pictures and k in _PICTURES)
    }
    if (order or has_other_pictures) and not allow:
        what = _told(order) if order else "other training pictures"
        raise ValueError(
            f"the run would train in another order with {what}: leave that as it was, begin a new run without "
            "--resume, or go on all the same with --allow_changes true"
        )
    # It takes its shape, and its length, from what is given.
    is_shape = str(new.get("model.scheduler.class_path")).endswith("WarmupCosine")
    held = {
        key: old[key]
        for key in differing
        if _flag(key).startswith(_HELD) and not (is_shape and key.startswith("model.scheduler."))
    }
    stay = {_flag(key): values[_flag(key)] for key in held}
    changed = {
        k: v for k, v in values.items() if k not in stay and (k in order or not k.startswith(_FREE))
    }
    of_the_model = {
        k: v for k, v in changed.items() if k.startswith(("data.", "model.")) and k not in order
    }
    if is_finished and of_the_model:
        raise ValueError(
            f"the run is finished, and was not trained with {_told(of_the_model)}: leave that as it was, or begin a "
            "new run without --resume"
        )
    if is_finished:  # nothing trains, so that only what decides about the test can apply
        changed = {key: value for key, value in changed.items() if key in _OF_TEST or key in order}
    told = [f"changed: {_told(changed)}"] if changed else []
    if is_shape and not changed.keys().isdisjoint(_LENGTH):
        told.append(
            "the learning rate goes on where WarmupCosine of the new length is by now, not as if begun with it"
        )
    told += [
        f"{key} stays {json.dumps(a)}, not {json.dumps(b)}, since the checkpoint decides"
        for key, (a, b) in stay.items()
    ]
    return "; ".join(told), held


def _is_longer(old: float | None, new: float | None) -> bool:
    # a share of an epoch's batches, which are not known here
    if isinstance(old, float) or isinstance(new, float):
        return False
    before, now = (math.inf if limit in (None, -1) else limit for limit in (old, new))
    return now > before


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _flag(key: str) -> str:
    return key.replace(".init_args.", ".")  # as it is written on the command line


def _told(values: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{key} {json.dumps(new)} (was {json.dumps(old)})" for key, (old, new) in values.items()
    )
