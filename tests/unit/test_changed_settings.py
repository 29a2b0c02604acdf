"""Which settings may differ between a run and the command that resumes it."""

import copy
from typing import Any

import pytest

from finetune.runs.changes import compare_settings

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.005, "momentum": 0.9}}
ADAM = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}
STEP = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
BEFORE: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 5, "devices": "auto", "precision": "32-true", "progress": None},
    "model": {
        "members": 1,
        "freeze": None,
        "weights": "DEFAULT",
        "label_smoothing": 0.0,
        "optimizer": SGD,
        "scheduler": STEP,
    },
    "data": {
        "class_path": "finetune.ImageFolderData",
        "init_args": {"root": "a", "batch_size": 12, "split_seed": 0, "num_workers": "auto"},
    },
}


def changed(**values: Any) -> dict[str, Any]:
    """BEFORE with other values, by dotted key; __ stands for the dot."""
    now = copy.deepcopy(BEFORE)
    for key, value in values.items():
        *path, last = key.split("__")
        group = now
        for name in path:
            group = group[name]
        group[last] = value
    return now


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {}),
        ({"minutes": None}, {"minutes": 1.0}),  # for new runs
        ({}, {"trainer__devices": 2, "data__init_args__num_workers": 3}),  # where and how fast
        ({}, {"data__init_args__root": "b"}),  # the same images elsewhere
    ],
)
def test_resume_reports_no_change_that_changes_nothing(before, now):
    assert compare_settings(changed(**before), changed(**now), False, False) == ("", {})
    assert compare_settings({}, changed(**now), False, False) == ("", {})  # its config.yaml is gone


def test_resume_reports_what_holds_now():
    now = changed(trainer__max_epochs=9, trainer__precision="64-true", model__label_smoothing=0.1)
    reported, held = compare_settings(BEFORE, now, False, False)
    assert reported == (
        'changed: trainer.max_epochs 9 (was 5), trainer.precision "64-true" (was "32-true"), '
        "model.label_smoothing 0.1 (was 0.0)"
    )
    assert held == {}
    # a finished run reports no change that does not happen
    shorter = changed(trainer__max_epochs=3, trainer__gradient_clip_val=1.0)
    assert compare_settings(BEFORE, shorter, False, False, is_finished=True) == ("", {})


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("model__optimizer__init_args__lr", 0.005, 0.1),
        ("model__scheduler__init_args__step_size", 3, 4),
        ("model__weights", "DEFAULT", None),
        ("threshold", "f1", "recall:0.9"),  # best.ckpt may have one
        ("model__class_weights", {"a": 2.0}, {"a": 2.0, "b": 3.0}),
    ],
)
def test_resume_keeps_and_reports_what_the_checkpoint_decides(key, before, now):
    reported, held = compare_settings(changed(**{key: before}), changed(**{key: now}), False, False)
    dotted = key.replace("__", ".")
    assert held == {dotted: before} and "stays" in reported
    assert dotted.replace(".init_args", "") in reported


def test_resume_takes_the_shape_of_our_own_schedule_from_the_command():
    cosine = {"class_path": "finetune.WarmupCosine", "init_args": {"warmup": 0.1}}
    other = {"class_path": "finetune.WarmupCosine", "init_args": {"warmup": 0.2}}
    before = changed(model__scheduler=cosine)
    reported, held = compare_settings(before, changed(model__scheduler=other), False, False)
    assert "model.scheduler.warmup 0.2 (was 0.1)" in reported and held == {}
    # a prolonged run differs from one that was long from the start
    longer = changed(model__scheduler=cosine, trainer__max_epochs=9)
    reported, _ = compare_settings(before, longer, False, False)
    assert "max_epochs 9 (was 5)" in reported and "of the new length" in reported
