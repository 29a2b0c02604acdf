"""Each kind of parallelism equals plain torch on one device; a wrong variant of it is caught.

Pipelines and sharded layers in processes of their own, as `finetune parity` runs them: test_by_hand_and_parity.py.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from finetune.models.backbones import build
from finetune.parity import branches, data_parallel
from finetune.parity.branches import Branches, Siamese
from finetune.parity.data_parallel import (
    get_params,
    init_params,
    lenet,
    predict,
    train_batch,
)
from finetune.parity.pipeline import layers, part_inputs, partition
from finetune.parity.tensor_parallel import full_state, linear_names, shard_linear

CPU = torch.device("cpu")
LR = 0.05


def loud_params() -> list[Tensor]:
    """Ten times the book's weights: with those, the loss would lie on its plateau for all the steps of a test."""
    return [10 * p for p in init_params(0, torch.float64)]


def batches(num: int = 16, steps: int = 20) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.rand(num, 1, 28, 28, generator=generator, dtype=torch.float64)
        yield X, torch.randint(10, (num,), generator=generator)


def lenet_of_modules() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 20, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).double()


def turned(params: list[Tensor]) -> list[Tensor]:
    """The weights of linear layers transposed, as nn.Linear holds them, or back."""
    return [p.T if p.dim() == 2 else p for p in params]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """The weights of torch's modules, trained by torch's optimizer on the mean loss of each whole batch."""
    network = lenet_of_modules()
    with torch.no_grad():
        for p, value in zip(network.parameters(), turned(loud_params()), strict=True):
            p.copy_(value)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    for X, y in batches():
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(network(X), y).backward()
        optimizer.step()
    return turned([p.detach() for p in network.parameters()])


def by_hand(devices: list[torch.device]) -> list[list[Tensor]]:
    """The weights of each replica after training."""
    device_params = [get_params(loud_params(), device) for device in devices]
    for X, y in batches():
        train_batch(X, y, device_params, devices, LR)
    return [[p.detach().cpu() for p in replica] for replica in device_params]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


def added_twice(data: list[Tensor]) -> None:
    """Control: the second loop adds where it should copy."""
    for i in range(1, len(data)):
        data[0].add_(data[i])
    for i in range(1, len(data)):
        data[i].add_(data[0])


def forgotten(data: list[Tensor]) -> None:
    """Control: nothing is exchanged."""


# float64: twenty steps of rounding, far below any mistake (measured: 6e-17 at weights of up to 0.5).
@pytest.mark.parametrize("k", [1, 2, 4])
def test_data_parallel_every_replica_is_the_network_of_one_device(expected, k):
    replicas = by_hand([CPU] * k)
    assert max(distance(replica, expected) for replica in replicas) <= 1e-10
    # else the comparison would hold for networks that never learned
    assert min(float((p - q).abs().max()) for p, q in zip(expected, loud_params(), strict=True)) > (
        1e-3
    )


@pytest.mark.parametrize("wrong", [added_twice, forgotten])
def test_control_wrong_sums_of_gradients_lead_elsewhere(expected, monkeypatch, wrong):
    monkeypatch.setattr(data_parallel, "allreduce", wrong)
    assert min(distance(replica, expected) for replica in by_hand([CPU] * 2)) > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("names", [["cuda:0"], ["cuda:0", "cuda:0"], ["cpu", "cuda:0"]])
def test_data_parallel_on_cuda_devices_computes_what_the_cpu_does(expected, names):
    for replica in by_hand([torch.device(name) for name in names]):
        assert distance(replica, expected) <= 1e-10


@pytest.mark.parametrize(("num", "k"), [(16, 1), (10, 4), (3, 8)])
def test_prediction_over_replicas_is_that_of_one(num, k):
    X, _ = next(batches(num))
    logits = predict(X, [get_params(loud_params(), CPU) for _ in range(k)], [CPU] * k)
    assert not logits.requires_grad
    # the same sums, at most in other blocks
    assert float((logits - lenet(X, loud_params())).abs().max()) <= 1e-12


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pipeline_the_parts_one_after_another_are_the_network(k):
    network = lenet_of_modules()
    parts = partition(layers(network), k)
    x, _ = next(batches(4))
    state = {name: value for part in parts for name, value in part.state_dict().items()}
    assert all(torch.equal(state[name], value) for name, value in network.state_dict().items())
    y = x
    for part, shape in zip(parts, part_inputs(parts, x), strict=False):
        assert y.shape == shape.shape
        y = part(y)
    torch.testing.assert_close(y, network(x), rtol=0, atol=0)


def test_layer_wise_a_sharded_network_is_the_whole_one(group_of_one):
    torch.manual_seed(0)
    network = build("lenet", 10).double()
    sharded = shard_linear(
        copy.deepcopy(network), linear_names(network), init_device_mesh("cpu", (1,))
    )
    x = torch.rand(4, 3, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(sharded(x), network(x), rtol=0, atol=1e-12)
    for name, value in full_state(sharded).items():
        assert torch.equal(value, network.state_dict()[name])


def two_branches(steps: int = 3) -> float:
    """How far a Siamese network on two devices is from that on one, after some steps."""
    torch.manual_seed(0)
    single = Siamese().double()
    split = Branches(single, [CPU, CPU])
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (single, split)]
    for _ in range(steps):
        x = torch.randn(2, 4, 20, 256, dtype=torch.float64)  # 20 of the 140 steps
        y = torch.randint(2, (4,)).double()
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(single(x), y).backward()
        split.step(x, y)
        for optimizer in optimizers:
            optimizer.step()
    state = split.full_state()
    return max(
        float((state[name] - value).abs().max()) for name, value in single.state_dict().items()
    )


def test_branches_on_two_devices_are_the_network_of_one(monkeypatch):
    assert two_branches() <= 1e-12
    monkeypatch.setattr(branches, "allreduce", forgotten)
    assert two_branches() > 1e-4  # the control: each copy by itself
