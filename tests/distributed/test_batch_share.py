"""Which part of a batch is whose, on a mesh of six devices that are counted out by hand."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.distributed.batch_share import batch_share, group_of_batch, is_counted, is_sharded, zero_loss
from finetune.training.loss import Target, loss_sum


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The trainer of one of six devices, which share out a batch in two and the head in three; nothing is sent."""
    dist.init_process_group("fake", rank=request.param, world_size=6, store=FakeStore())
    strategy = Mock(spec=ModelParallelStrategy)
    strategy.device_mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("data_parallel", "tensor_parallel"))
    yield SimpleNamespace(strategy=strategy, global_rank=request.param, world_size=6)
    dist.destroy_process_group()


# Rows of the mesh are 0 1 2 and 3 4 5: a row sees the same pictures, a column makes up a batch.
@pytest.mark.parametrize(
    ("device", "share", "counted", "column"),
    [
        (0, (0, 2), True, [0, 3]),
        (1, (0, 2), False, [1, 4]),
        (3, (1, 2), True, [0, 3]),
        (5, (1, 2), False, [2, 5]),
    ],
    indirect=["device"],
)
def test_on_a_mesh(device, share, counted, column):
    assert batch_share(device) == share and is_counted(device) == counted and is_sharded(device)
    assert dist.get_process_group_ranks(group_of_batch(device)) == column


def test_without_a_mesh_all_devices_make_up_a_batch():
    assert batch_share(None) == (0, 1)
    trainer = SimpleNamespace(strategy=None, global_rank=1, world_size=3)
    assert batch_share(trainer) == (1, 3) and is_counted(trainer)
    assert not is_sharded(trainer) and group_of_batch(trainer) is None
    # Before the processes have met there is no mesh to ask.
    early = SimpleNamespace(strategy=Mock(spec=ModelParallelStrategy), global_rank=0, world_size=3)
    assert batch_share(early) == (0, 3)


def test_the_loss_of_no_picture_reaches_every_parameter_that_learns_and_moves_none():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    network[0].requires_grad_(False)
    loss = zero_loss(network)
    loss.backward()
    assert loss == 0 and all(parameter.grad is None for parameter in network[0].parameters())
    for parameter in [*network[1].parameters(), *network[2].parameters()]:
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_loss_of_no_picture_has_the_type_of_one_of_pictures(dtype):
    network = nn.Linear(3, 2).to(dtype)
    loss = zero_loss(network)
    logits, class_weight = torch.zeros(1, 2, dtype=dtype), torch.ones(2, dtype=dtype)
    assert loss.dtype == loss_sum(logits, Target(torch.tensor([0])), class_weight, 0.0).dtype  # devices add them up
    loss.backward()
    assert network.weight.grad.equal(torch.zeros(2, 3, dtype=dtype))
