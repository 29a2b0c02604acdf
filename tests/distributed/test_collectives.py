"""Values that ranks exchange: the arguments stay unchanged, and GPU ranks communicate on the CPU."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from finetune.distributed.collectives import all_reduce_sum, cpu_group


def test_one_device_has_the_sum_already(group_of_one):
    weight = torch.ones(2, requires_grad=True)
    total = all_reduce_sum(weight, 1)
    assert torch.equal(total, weight) and not total.requires_grad
    total += 1
    assert torch.equal(weight, torch.ones(2))


def test_the_sum_waits_for_no_barrier(monkeypatch):
    monkeypatch.setattr(
        dist, "barrier", lambda *_, **__: pytest.fail("NCCL's would wait for all that is queued")
    )
    monkeypatch.setattr(dist, "all_reduce", lambda value: value.mul_(3))
    assert all_reduce_sum(torch.tensor(2.0), 3) == 6


@pytest.mark.parametrize(("backend", "is_new"), [("gloo", False), ("nccl", True)])
def test_objects_go_through_cpus(group_of_one, monkeypatch, backend, is_new):
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    given, new_group = [], dist.new_group
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda **options: given.append(options["timeout"]) or new_group(**options),
    )
    group = cpu_group(SimpleNamespace(_timeout=timedelta(minutes=5)))
    assert given == [timedelta(minutes=5)] * is_new
    assert (group is not dist.group.WORLD) == is_new
    assert (
        dist.group.WORLD is not None
        and "gloo" in type(group._get_backend(torch.device("cpu"))).__name__.lower()
    )
