"""Compares the settings of a command that resumes a run with the run's config.yaml.

Some settings must not change. Others keep the values in the checkpoint.

A key is a setting with the groups of config.yaml, such as `data.init_args.root`. A flag is the same setting on the
command line, `data.root`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Pair = tuple[Any, Any]  # the values of a setting in the run and in the command

# With other values training sees the images in another order.
_ORDER = ("seed_everything", "data.batch_size")
_IMAGE_SETTINGS = (
    "data.root",
    "data.table",
    "data.corrections",
    "data.val_fraction",
    "data.test_fraction",
    "data.split_seed",
    "data.columns",
    "data.labels",
    "data.label_separator",
    "data.merge",
    "data.group_by",
    "data.num_folds",
    "data.fold",
)
# With other values the state of the optimizer would not fit.
_FIXED = (
    "model.backbone",
    "model.members",
    "model.head_stages",
    "model.freeze",
    "model.layer_decay",
    "model.decay_norm_and_bias",
    "model.optimizer.class_path",
    "model.scheduler.class_path",
)
# Settings that are used at the beginning only, or that are stored in the checkpoint.
_DECIDED_BY_CHECKPOINT = (
    "model.optimizer.",
    "model.scheduler.",
    "model.head_lr_multiplier",
    "model.class_weights",
    "model.weights",
    "model.head_init",
    "model.source_classes",
    "model.class_mapping",
    "threshold",  # best.ckpt may have one already
)
# Settings that are compared as a whole: a class that only one of them names is a difference, too.
_COMPLETE = ("model.class_weights",)
_LENGTH = ("trainer.max_epochs", "trainer.max_steps", "trainer.limit_train_batches")
_OF_TEST = ("trainer.limit_test_batches", "trainer.precision")
# Settings that change no result: devices, speed and output.
_WITHOUT_EFFECT = (
    "resume",
    "ckpt_path",
    "allow_changes",
    "minutes",
    "test_after_fit",
    "name",
    "keep_last",
    "folds",
    "checkpoint_every_n_steps",
    "model.compile",
    "data.num_workers",
    "data.cache_limit_gb",
    "data.predict",
    "data.root",
    "data.table",
    "data.corrections",
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.default_root_dir",
    "trainer.logger",
    "trainer.log_every_n_steps",
    "trainer.enable_progress_bar",
    "trainer.profiler",
)


def compare_settings(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    has_other_images: bool,
    allow: bool,
    is_finished: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Compare the settings of a run with those of the command that resumes it.

    Args:
        before: Settings in the run's config.yaml; empty if the file is missing.
        now: Settings of the command.
        has_other_images: Whether the training or validation images differ.
        allow: Whether the order of the images may change.
        is_finished: Whether the run has nothing left to train, so that settings of data and model have no effect.

    Returns:
        A message about the differences, "" for none, and the values of the run that replace those of the command.

    Raises:
        ValueError: A setting differs that must not, or only with `allow`.
    """
    old = dict(_flatten(before or now))
    new = dict(_flatten(now))
    differing = _differing(old, new)
    values = {_flag(key): (old.get(key), new.get(key)) for key in differing}
    _check_fixed(values, old)
    order = {
        flag: pair
        for flag, pair in values.items()
        if flag in _ORDER or (has_other_images and flag in _IMAGE_SETTINGS)
    }
    _check_order(order, has_other_images, allow)
    # WarmupCosine takes its shape and length from the command, not from the checkpoint.
    has_warmup_cosine = str(new.get("model.scheduler.class_path")).endswith("WarmupCosine")
    from_checkpoint = {
        key: old[key]
        for key in differing
        if _flag(key).startswith(_DECIDED_BY_CHECKPOINT)
        and not (has_warmup_cosine and key.startswith("model.scheduler."))
    }
    restored = {_flag(key): values[_flag(key)] for key in from_checkpoint}
    changed = {
        flag: pair
        for flag, pair in values.items()
        if flag not in restored and (flag in order or not flag.startswith(_WITHOUT_EFFECT))
    }
    if is_finished:
        _check_not_trained_otherwise(changed, order)
        # nothing is trained, so only settings of the test have an effect
        changed = {
            flag: pair for flag, pair in changed.items() if flag in _OF_TEST or flag in order
        }
    messages = [f"changed: {_in_words(changed)}"] if changed else []
    if has_warmup_cosine and not changed.keys().isdisjoint(_LENGTH):
        messages.append(
            "the learning rate continues at the current step of a WarmupCosine of the new length"
        )
    messages += [
        f"{flag} stays {json.dumps(a)}, not {json.dumps(b)}, since the checkpoint decides"
        for flag, (a, b) in restored.items()
    ]
    return "; ".join(messages), from_checkpoint


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys of the settings that differ.

    Arguments that only one of two classes has are skipped: the names of the classes differ already.
    """
    common = [key for key in {**old, **new} if key in _FIXED or (key in old and key in new)]
    return [key for key in common if old.get(key) != new.get(key)]


def _check_fixed(values: Mapping[str, Pair], old: Mapping[str, Any]) -> None:
    """Check that no setting differs with which the state of optimizer or scheduler would not fit.

    Args:
        values: The settings that differ.
        old: All settings of the run.

    Raises:
        ValueError: One does.
    """
    is_one = old.get("model.members") == 1  # an ensemble cannot give its weights to a new run
    hint = "may start from its weights: --model.weights LAST.CKPT" if is_one else "begins"
    if fixed := {flag: pair for flag, pair in values.items() if flag in _FIXED}:
        raise ValueError(
            f"the run cannot continue with {_in_words(fixed)}; a new run {hint} without --resume"
        )


def _check_order(order: Mapping[str, Pair], has_other_images: bool, allow: bool) -> None:
    """Check that training sees the images in the order in which the run began, unless another one is allowed.

    Args:
        order: The differing settings that decide the order.
        has_other_images: Whether the training or validation images differ.
        allow: Whether the order may change.

    Raises:
        ValueError: The order changes.
    """
    if (order or has_other_images) and not allow:
        what = "train or validate on other images, labels or groups: restore them"
        if order:
            what = f"train in another order with {_in_words(order)}: keep the old value"
        raise ValueError(
            f"the run would {what}, begin a new run without --resume, or continue with --allow_changes true"
        )


def _check_not_trained_otherwise(changed: Mapping[str, Pair], order: Mapping[str, Pair]) -> None:
    """Check that the command of a finished run has the settings of data and model with which it was trained.

    Args:
        changed: The settings that differ and have an effect.
        order: Those of them that decide the order of images, which were allowed to change.

    Raises:
        ValueError: One differs.
    """
    of_the_model = {
        flag: pair
        for flag, pair in changed.items()
        if flag.startswith(("data.", "model.")) and flag not in order
    }
    if of_the_model:
        raise ValueError(
            f"the run is finished, and was not trained with {_in_words(of_the_model)}: leave that as it was, or begin "
            "a new run without --resume"
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested dicts with dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value and prefix + key not in _COMPLETE:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _flag(key: str) -> str:
    """Return a key as it is written on the command line."""
    return key.replace(".init_args.", ".")


def _in_words(values: Mapping[str, Pair]) -> str:
    return ", ".join(
        f"{key} {json.dumps(new)} (was {json.dumps(old)})" for key, (old, new) in values.items()
    )
