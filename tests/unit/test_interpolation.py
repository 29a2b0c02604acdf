"""The weights between a fit's start and its end, and which of them are kept."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from promise import promise
from torch import Tensor

from finetune.models.checkpoint import FINETUNE
from finetune.training.best_weights import choose, interpolate, settle
from finetune.training.task import Task

VALUES = st.lists(st.floats(-1e3, 1e3, width=32), min_size=5, max_size=5)


@given(start=VALUES, end=VALUES, share=st.floats(0, 1))
def test_interpolated_weights_are_on_a_straight_line_with_exact_ends(start, end, share):
    ends = [
        {"weight": torch.tensor(v), "half": torch.tensor(v).half(), "num": torch.tensor(n)}
        for n, v in enumerate((start, end))
    ]
    found = interpolate(*ends, share)
    exact = (1 - share) * ends[0]["weight"].double() + share * ends[1]["weight"].double()
    # rounded to float32
    torch.testing.assert_close(found["weight"].double(), exact, rtol=1e-6, atol=1e-3)
    assert found["half"].dtype == torch.float16 and int(found["num"]) == 1
    for at in (0, 1):
        values = interpolate(*ends, float(at))
        assert all(values[name].equal(ends[at][name]) for name in ("weight", "half"))


# Losses of 100 images under the start, the weights between, and the end: a mean for each, around which images differ
# by 0.1 in the same way (paired), and by `noise` in their own.
CASES = {
    "training helped clearly": ([0.9, 0.8, 0.7], 0.1, 2),
    "training helped, but not clearly": ([0.71, 0.7, 0.7], 1.0, 1),
    "training harmed": ([0.7, 1.2, 1.5], 0.1, 0),
    "training harmed, but what lies between is as good": ([0.7, 0.7, 1.5], 1.0, 1),
    "nothing changed": ([0.7, 0.7, 0.7], 0.0, 1),
    "without weights between, nothing changed": ([0.7, 0.7], 0.1, 1),
    "without weights between, training harmed": ([0.7, 1.5], 0.1, 0),
}


@promise("best-weights")
@pytest.mark.parametrize("case", CASES)
def test_a_clear_gain_is_kept_and_a_clear_loss_is_not(case):
    means, noise, expected = CASES[case]
    rng = np.random.default_rng(0)
    differences = noise * rng.standard_normal((len(means), 100))
    differences -= differences.mean(axis=1, keepdims=True)
    losses = np.array(means)[:, None] + 0.1 * rng.standard_normal(100) + differences
    assert choose(losses) == expected
    assert choose(losses[:, :1]) == 1  # one image says nothing


class Linear(torch.nn.Linear):
    """A network for a task, without a Trainer."""

    class_names = ("a", "b")

    def __init__(self, kind: str) -> None:
        super().__init__(2, 2)
        self.task = Task(kind, self.class_names)


IMAGES = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
LABELS = {"single": (IMAGES[:, 0] > 0).long(), "several": (IMAGES > 0.3).float()}
RIGHT = {
    "single": {"weight": torch.tensor([[-3.0, 0.0], [3.0, 0.0]]), "bias": torch.zeros(2)},
    "several": {"weight": 3 * torch.eye(2), "bias": torch.full((2,), -1.0)},
}
WRONG = {
    "single": {"weight": torch.full((2, 2), torch.nan), "bias": torch.zeros(2)},  # no numbers
    "several": {"weight": torch.eye(2).flip(0), "bias": torch.zeros(2)},
}
AIMS = {"single": "f1:b", "several": "recall:0.9"}


def settled(kind: str, start: dict[str, Tensor], end: dict[str, Tensor]):
    model = Linear(kind)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return settle(
        trainer,
        model,
        start=start,
        end=end,
        batches=[{"image": IMAGES, "label": LABELS[kind], "index": torch.arange(60), "bad": []}],
        shares=(0.0, 1.0),
        aim=model.task.parse_aim(AIMS[kind]),
    )


@pytest.mark.parametrize("kind", RIGHT)
def test_the_better_of_start_and_end_is_measured_kept_and_recorded(kind):
    for ends, expected in (((RIGHT, WRONG), 0.0), ((WRONG, RIGHT), 1.0)):
        weights, calibration, record = settled(kind, *(end[kind] for end in ends))
        assert record["share"] == expected and record["num_images"] == 60
        assert all(weights[name].equal(RIGHT[kind][name]) for name in weights)
        assert calibration.num_images == 60 and calibration.aim is not None
        metric = {"single": "accuracy", "several": "mAP"}[kind]
        assert FINETUNE["interpolation"].accepts(record)
        assert record["candidates"][int(expected)][metric] == 1
    record["candidates"][0]["other"] = record["candidates"][0].pop(metric)  # the control
    assert not FINETUNE["interpolation"].accepts(record)
