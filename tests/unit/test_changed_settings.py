"""Which settings may differ between a run and the command that resumes it."""

from typing import Any

import pytest

from finetune.fitting.resume import (
    changes_between,
    check_fixed,
    describe_changes,
)
from finetune.settings.fields import ClassSettings
from finetune.settings.layers import flat, replaced
from finetune.settings.schema import FitSettings

SGD = ClassSettings("torch.optim.SGD", {"lr": 0.005, "momentum": 0.9})
BEFORE = replaced(
    FitSettings(), {"trainer.max_epochs": 5, "data.root": "a", "model.optimizer": SGD}
)


def described(values: dict[str, Any], has_other_images: bool = False, **how: bool) -> str:
    changes = changes_between(flat(BEFORE), replaced(BEFORE, values))
    return describe_changes(changes, has_other_images, how.pop("allow", False), **how)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"minutes": 1.0},  # for new runs
        {"trainer.devices": 2, "data.num_workers": 3},  # where and how fast
        {"data.root": "b"},  # the same images elsewhere
    ],
)
def test_resume_reports_no_change_that_changes_nothing(values):
    assert described(values) == ""


def test_resume_reports_what_holds_now():
    values = {"model.label_smoothing": 0.1, "trainer.precision": "64-true", "trainer.max_epochs": 9}
    assert described(values) == (
        'changed: model.label_smoothing 0.1 (was 0.0), trainer.precision "64-true" (was null), '
        "trainer.max_epochs 9 (was 5)"
    )
    # a finished run reports no change that does not happen
    shorter = {"trainer.max_epochs": 3, "trainer.gradient_clip_val": 1.0}
    assert described(shorter, is_finished=True) == ""
    with pytest.raises(ValueError, match=r"not trained with model\.label_smoothing"):
        described({"model.label_smoothing": 0.1}, is_finished=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.optimizer", ClassSettings("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9})),
        ("model.optimizer", ClassSettings("torch.optim.Adam", {"lr": 0.005})),
        ("model.scheduler", ClassSettings("finetune.WarmupCosine", {"warmup": 0.4})),
        ("model.weights", None),
        ("threshold", "recall:0.9"),  # best.ckpt may have one
        ("model.class_weights", {"a": 2.0, "b": 3.0}),
    ],
)
def test_resume_refuses_what_the_checkpoint_decides(name, value):
    changes = changes_between(flat(BEFORE), replaced(BEFORE, {name: value}))
    with pytest.raises(ValueError, match=name):
        check_fixed(changes)
    check_fixed(changes_between(flat(BEFORE), BEFORE))  # the control


def test_resume_refuses_another_order():
    for values, has_other_images in (({"data.batch_size": 8}, False), ({"data.root": "b"}, True)):
        with pytest.raises(ValueError, match="allow_changes"):
            described(values, has_other_images)
        assert described(values, has_other_images, allow=True) != ""
