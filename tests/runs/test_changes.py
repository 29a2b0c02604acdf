"""Which settings may differ between a run and the command that resumes it."""

import copy
from typing import Any

import pytest

from finetune.runs.changes import compare_settings

BEFORE: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {
        "max_epochs": 5,
        "devices": "auto",
        "precision": "32-true",
        "enable_progress_bar": None,
    },
    "model": {
        "members": 1,
        "freeze": None,
        "weights": "DEFAULT",
        "label_smoothing": 0.0,
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.005, "momentum": 0.9}},
        "scheduler": {
            "class_path": "torch.optim.lr_scheduler.StepLR",
            "init_args": {"step_size": 3},
        },
    },
    "data": {
        "class_path": "finetune.ImageFolderData",
        "init_args": {
            "root": "a",
            "batch_size": 12,
            "split_seed": 0,
            "image_size": 32,
            "num_workers": "auto",
        },
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


def test_a_run_keeps_the_aim_of_its_threshold_since_best_may_have_one():
    reported, held = compare_settings(
        changed(threshold="f1"), changed(threshold="recall:0.9"), False, False
    )
    assert held == {"threshold": "f1"} and reported.startswith(
        'threshold stays "f1", not "recall:0.9"'
    )


def test_the_same_is_not_worth_a_word():
    assert compare_settings(BEFORE, BEFORE, False, False) == ("", {})
    assert compare_settings({}, BEFORE, False, False) == ("", {})  # a run whose config.yaml is gone
    # they are for new runs
    minutes = changed(minutes=None), changed(minutes=1.0)
    assert compare_settings(*minutes, False, False) == ("", {})


def test_weights_of_classes_stay_and_a_class_that_only_one_file_names_is_noticed():
    before = changed(model__class_weights={"a": 2.0})
    message, held = compare_settings(
        before, changed(model__class_weights={"a": 2.0, "b": 3.0}), False, False
    )
    assert held == {"model.class_weights": {"a": 2.0}}
    assert message == (
        'model.class_weights stays {"a": 2.0}, not {"a": 2.0, "b": 3.0}, since the checkpoint decides'
    )
    assert compare_settings(before, before, False, False) == ("", {})


@pytest.mark.parametrize(
    "free",
    [
        {"trainer__devices": 2, "trainer__enable_progress_bar": False},
        {"data__init_args__num_workers": 3},
        {"data__init_args__root": "b"},  # the same images elsewhere
    ],
)
def test_where_and_how_fast_it_runs_is_not_worth_a_word(free):
    assert compare_settings(BEFORE, changed(**free), False, False) == ("", {})


def test_what_holds_now_is_reported():
    now = changed(trainer__max_epochs=9, trainer__precision="64-true", model__label_smoothing=0.1)
    reported, held = compare_settings(BEFORE, now, False, False)
    assert reported == (
        'changed: trainer.max_epochs 9 (was 5), trainer.precision "64-true" (was "32-true"), '
        "model.label_smoothing 0.1 (was 0.0)"
    )
    assert held == {}


def test_what_the_checkpoint_decides_stays():
    now = changed(
        model__optimizer__init_args__lr=0.1,
        model__scheduler__init_args__step_size=4,
        model__weights=None,
    )
    reported, held = compare_settings(BEFORE, now, False, False)
    assert "model.optimizer.lr stays 0.005, not 0.1, since the checkpoint decides" in reported
    assert held == {
        "model.optimizer.init_args.lr": 0.005,
        "model.scheduler.init_args.step_size": 3,
        "model.weights": "DEFAULT",
    }


def test_the_shape_of_our_own_schedule_is_what_is_given():
    cosine = {"class_path": "finetune.WarmupCosine", "init_args": {"warmup": 0.1}}
    before, now = changed(model__scheduler=cosine), changed(model__scheduler=copy.deepcopy(cosine))
    now["model"]["scheduler"]["init_args"]["warmup"] = 0.2
    assert compare_settings(before, now, False, False) == (
        "changed: model.scheduler.warmup 0.2 (was 0.1)",
        {},
    )


def test_a_prolonged_run_reports_that_it_differs_from_one_that_was_long_from_the_start():
    cosine = {"class_path": "finetune.WarmupCosine", "init_args": {"warmup": 0.1}}
    now = changed(model__scheduler=cosine, trainer__max_epochs=9)
    reported, _ = compare_settings(changed(model__scheduler=cosine), now, False, False)
    assert reported == (
        "changed: trainer.max_epochs 9 (was 5); the learning rate continues at the current step of a WarmupCosine of "
        "the new length"
    )


def test_a_finished_run_reports_no_change_that_does_not_happen():
    shorter = changed(trainer__max_epochs=3, trainer__gradient_clip_val=1.0)
    assert compare_settings(BEFORE, shorter, False, False, is_finished=True) == ("", {})
    # the control
    assert compare_settings(BEFORE, shorter, False, False)[0].startswith(
        "changed: trainer.max_epochs 3 (was 5)"
    )
    tested = changed(trainer__limit_test_batches=3)
    assert (
        compare_settings(BEFORE, tested, False, False, is_finished=True)[0]
        == compare_settings(BEFORE, tested, False, False)[0]
    )
