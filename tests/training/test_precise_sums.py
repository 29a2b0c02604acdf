"""Sums over devices continue after a resume: nothing is lost, nothing is counted twice."""

import pytest
import torch

from finetune.training.metrics import MeanLoss
from finetune.training.precise_sums import global_sums, restore_sums


def filled(*losses: float) -> MeanLoss:
    metric = MeanLoss()
    for loss in losses:
        metric.update(torch.tensor(loss, dtype=torch.float64), torch.tensor(1.0))
    return metric


def test_sums_continue_where_they_were():
    full = filled(1.0, 2.5, 4.0)
    part = filled(1.0, 2.5)
    again = filled(9.0)
    restore_sums(again, global_sums(part), is_rank_zero=True)
    again.update(torch.tensor(4.0), torch.tensor(1.0))
    assert again.compute() == full.compute() and global_sums(again) == global_sums(full)


def test_one_device_takes_them_and_the_others_start_at_zero():
    sums = global_sums(filled(1.0, 3.0))
    devices = [filled(7.0), filled(7.0)]
    for rank, metric in enumerate(devices):
        restore_sums(metric, sums, is_rank_zero=rank == 0)
    assert sum(float(metric.weight) for metric in devices) == 2 and float(devices[1].sum) == 0


def test_what_is_kept_is_a_copy():
    metric = filled(1.0)
    sums = global_sums(metric)
    metric.update(torch.tensor(5.0), torch.tensor(1.0))
    assert sums == global_sums(filled(1.0))


@pytest.mark.parametrize(
    "way", ["half", "bfloat16", "float", torch.float16, torch.bfloat16, torch.float64]
)
def test_a_model_of_another_precision_leaves_them_in_float64(way):
    """By `half()` and its like, and by `to`, as Lightning has it for `bf16-true` and torchmetrics does not know."""
    metric = filled(1 / 3)
    module = torch.nn.ModuleDict({"metric": metric, "layer": torch.nn.Linear(2, 2)})
    module = getattr(module, way)() if isinstance(way, str) else module.to(way)
    assert module["layer"].weight.dtype == (
        way if isinstance(way, torch.dtype) else getattr(torch, way)
    )
    assert metric.sum.dtype == torch.float64 and float(metric.sum) == 1 / 3
    metric.update(torch.tensor(1.0), torch.tensor(1.0))
    assert float(metric.sum) == 4 / 3
