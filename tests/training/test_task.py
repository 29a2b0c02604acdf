"""One object has the meaning of labels; another kind of label is another object."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_fits import data, fit
from torch import Tensor

from finetune import Classifier
from finetune.data.targets import ClassIndex
from finetune.training.calibration import Calibration
from finetune.training.task import SingleLabel

TASK = SingleLabel(("a", "b", "c"), label_smoothing=0.1)
LOGITS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 2, 1, 0, 0, 2])


def test_losses_are_those_of_torch():
    target = TASK.target({"label": LABELS})
    weight = torch.tensor([1.0, 2.0, 3.0])
    mean = TASK.loss_sum(LOGITS, target, weight) / target.weight(weight)
    torch.testing.assert_close(mean, F.cross_entropy(LOGITS, LABELS, weight, label_smoothing=0.1))
    p = TASK.probabilities(LOGITS, Calibration())
    expected = F.cross_entropy(LOGITS.double(), LABELS, reduction="none")
    torch.testing.assert_close(TASK.losses(p, LABELS), expected)
    assert not torch.allclose(TASK.losses(p, LABELS.flip(0)), expected)  # control


def test_members_are_combined_by_their_probabilities():
    each = torch.stack([LOGITS, 3 * LOGITS.flip(0)])
    combined = TASK.combined(each)
    torch.testing.assert_close(combined.softmax(1), each.softmax(2).mean(0))
    assert not torch.allclose(combined.softmax(1), each.mean(0).softmax(1), atol=1e-2)  # control
    assert TASK.combined(LOGITS) is LOGITS


def test_a_decision_is_the_most_probable_class():
    p = TASK.probabilities(LOGITS, Calibration(temperature=3.0, num_images=8))
    assert torch.equal(TASK.decide(p, Calibration()), LOGITS.argmax(1))
    assert TASK.score(LOGITS, LABELS) == (LOGITS.argmax(1) == LABELS).double().mean()


def test_the_standard_error_is_that_of_a_share():
    assert TASK.standard_error(0.8, 100) == pytest.approx(math.sqrt(0.16 / 100))
    assert TASK.standard_error(0.8, 0) == 0


def test_classes_are_weighted_to_count_the_same():
    weights = TASK.class_weights(ClassIndex(np.array([0, 0, 0, 1, 2, 2]), 3))
    assert weights.tolist() == pytest.approx([2 / 3, 2, 1])


@dataclass(frozen=True)
class Hinge(SingleLabel):
    """Another loss and another monitored metric."""

    monitor: ClassVar[str] = "val/f1"

    def loss_sum(self, logits: Tensor, target: Any, class_weight: Tensor) -> Tensor:
        return F.multi_margin_loss(logits, target.labels, weight=class_weight, reduction="sum")


def test_a_classifier_trains_and_measures_by_its_task(colours):
    images = data(colours, val_fraction=0, image_size=28)
    batch = next(iter(images.loader("train", train=True)))
    logged = {}
    for kind in (SingleLabel, Hinge):
        torch.manual_seed(0)
        model = Classifier(
            images.class_names,
            "small_cnn",
            weights=None,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        )
        model.task = kind(tuple(images.class_names))
        trainer = fit(model, images, max_steps=1)
        with torch.no_grad():
            logits = model(batch["image"])
        loss = model.task.loss_sum(logits, model.task.target(batch), model.class_weight)
        expected = loss / len(batch["label"])
        torch.testing.assert_close(trainer.callback_metrics["train/loss"], expected)
        logged[kind] = float(expected)
    assert abs(logged[SingleLabel] - logged[Hinge]) > 1e-3  # the control
