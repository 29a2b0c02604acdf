"""The weights between a fit's start and its end, and which of them are kept."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from promise import promise

from finetune.models.checkpoint_values import is_interpolation
from finetune.runs.interpolation_record import Interpolation
from finetune.training.interpolation import choose, interpolate, settle
from finetune.training.task import MultiLabel, SingleLabel
from finetune.training.threshold import LabelAim


def test_the_ends_are_exact_and_between_them_the_way_is_straight():
    start = {"weight": torch.rand(5), "half": torch.rand(5).half(), "num_batches": torch.tensor(3)}
    end = {"weight": torch.rand(5), "half": torch.rand(5).half(), "num_batches": torch.tensor(7)}
    for name, value in interpolate(start, end, 1.0).items():
        assert value.equal(end[name])
    at_start = interpolate(start, end, 0.0)
    assert at_start["weight"].equal(start["weight"]) and at_start["half"].equal(start["half"])
    between = interpolate(start, end, 0.75)
    expected = 0.25 * start["weight"].double() + 0.75 * end["weight"].double()
    # rounded to float32
    torch.testing.assert_close(between["weight"].double(), expected, rtol=0, atol=1e-7)
    assert between["half"].dtype == torch.float16 and int(between["num_batches"]) == 7


# Losses of 100 images under the start, the weights between, and the end: a mean for each, around which images differ
# by 0.1 in the same way (paired), and by `noise` in their own.
CASES = {
    "training helped clearly": ([0.9, 0.8, 0.7], 0.1, 2),
    "training helped, but not clearly": ([0.71, 0.7, 0.7], 1.0, 1),
    "training harmed": ([0.7, 1.2, 1.5], 0.1, 0),
    "training harmed, but what lies between is as good": ([0.7, 0.7, 1.5], 1.0, 1),
    "nothing changed": ([0.7, 0.7, 0.7], 0.0, 1),
}


@promise("best-weights")
@pytest.mark.parametrize("case", CASES)
def test_a_clear_gain_is_kept_and_a_clear_loss_is_not(case):
    means, noise, expected = CASES[case]
    rng = np.random.default_rng(0)
    differences = noise * rng.standard_normal((3, 100))
    differences -= differences.mean(axis=1, keepdims=True)
    losses = np.array(means)[:, None] + 0.1 * rng.standard_normal(100) + differences
    assert choose(losses) == expected


def test_of_two_candidates_the_end_is_kept_unless_the_start_is_clearly_better():
    same = np.linspace(0.1, 1, 50)
    wave = np.tile([0.05, -0.05], 25)
    assert choose(np.stack([same, same + wave])) == 1
    assert choose(np.stack([same, same + wave + 0.5])) == 0  # the control
    assert choose(np.stack([[0.1], [9.0]])) == 1  # one image says nothing


def test_weights_that_give_no_numbers_are_not_chosen():
    class Model(torch.nn.Linear):
        class_names = ("a", "b")
        task = SingleLabel(class_names)

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, 2, generator=generator)
    batch = {"image": images, "label": (images[:, 0] > 0).long()}
    right = {"weight": torch.tensor([[-3.0, 0.0], [3.0, 0.0]]), "bias": torch.zeros(2)}
    wrong = {"weight": torch.full((2, 2), torch.nan), "bias": torch.zeros(2)}
    trainer = SimpleNamespace(
        precision_plugin=SimpleNamespace(
            convert_module=lambda module: module, forward_context=nullcontext
        ),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    for start, end, expected in ((right, wrong, 0.0), (wrong, right, 1.0)):
        interpolation, weights, _ = settle(
            trainer,
            Model(2, 2),
            start=start,
            end=end,
            batches=[batch],
            shares=(0.0, 0.75, 1.0),
            aim=None,
        )
        assert interpolation.share == expected and weights["weight"].isfinite().all()


def test_candidates_of_several_labels_have_a_mean_average_precision():
    class Model(torch.nn.Linear):
        class_names = ("a", "b")
        task = MultiLabel(class_names)

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 2, generator=generator)
    batch = {"image": images, "label": (images > 0.3).float()}
    right = {"weight": 3 * torch.eye(2), "bias": torch.full((2,), -1.0)}
    wrong = {"weight": torch.eye(2).flip(0), "bias": torch.zeros(2)}
    trainer = SimpleNamespace(
        precision_plugin=SimpleNamespace(
            convert_module=lambda module: module, forward_context=nullcontext
        ),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    for start, end, expected in ((right, wrong, 0.0), (wrong, right, 1.0)):
        interpolation, _, calibration = settle(
            trainer,
            Model(2, 2),
            start=start,
            end=end,
            batches=[batch],
            shares=(0.0, 1.0),
            aim=LabelAim("recall", 0.9),
        )
        assert interpolation.share == expected and interpolation.chosen_score == 1
        assert calibration.num_images == 60 and calibration.aim == LabelAim("recall", 0.9)
        plain = interpolation.as_plain()
        assert {tuple(one) for one in plain["candidates"]} == {("share", "loss", "mAP")}
        assert is_interpolation(plain) and Interpolation.from_plain(plain) == interpolation
        assert re.search(
            r", by the loss on 60 validation images: before training 0\.\d{4} \(mAP [01]\.\d{3}\), fine-tuned ",
            interpolation.message(),
        )
        assert "clearly better" not in interpolation.message()
    half = replace(interpolation.candidates[0], share=0.5)
    mean = replace(interpolation, share=0.5, candidates=(*interpolation.candidates, half))
    assert ", since neither is clearly better by the loss on 60 " in mean.message()
    # the control: one class an image has an accuracy, as in checkpoints of earlier versions
    plain["candidates"][0]["accuracy"] = plain["candidates"][0].pop("mAP")
    assert not is_interpolation(plain)
