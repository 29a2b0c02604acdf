"""Replicas by hand equal one network trained by torch.optim; each promise has a wrong variant that is caught."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from finetune.parity import data_parallel
from finetune.parity.data_parallel import (
    allreduce,
    get_params,
    init_params,
    lenet,
    predict,
    split_batch,
    train_batch,
)

CPU = torch.device("cpu")
STEPS = 20
BATCH = 16
LR = 0.05


def loud_params(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Ten times the book's weights: with those, the loss would lie on its plateau for all the steps of a test."""
    return [10 * p for p in init_params(0, dtype)]


def batches(
    dtype: torch.dtype = torch.float64, num: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        X = torch.rand(num, 1, 28, 28, generator=generator, dtype=torch.float64)
        yield X.to(dtype), torch.randint(10, (num,), generator=generator)


def reference(
    params: list[Tensor], data: Iterator[tuple[Tensor, Tensor]], lr: float = LR
) -> list[Tensor]:
    """The same network of torch's modules, trained by torch's optimizer on the mean loss of each whole batch."""
    network = nn.Sequential(
        *(
            nn.Conv2d(1, 20, 3),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).to(params[0].dtype)
    with torch.no_grad():
        for p, value in zip(network.parameters(), turned(params), strict=True):
            p.copy_(value)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    for X, y in data:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(network(X), y).backward()
        optimizer.step()
    return turned([p.detach() for p in network.parameters()])


def turned(params: list[Tensor]) -> list[Tensor]:
    """The weights of linear layers transposed, as nn.Linear holds them, or back."""
    return [p.T if p.dim() == 2 else p for p in params]


def by_hand(
    params: list[Tensor],
    data: Iterator[tuple[Tensor, Tensor]],
    k: int,
    step: Callable = train_batch,
) -> list[list[Tensor]]:
    """The weights of each of k replicas on the CPU after training."""
    device_params = [get_params(params, CPU) for _ in range(k)]
    for X, y in data:
        step(X, y, device_params, [CPU] * k, LR)
    return [[p.detach() for p in replica] for replica in device_params]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


def farthest(replicas: list[list[Tensor]], expected: list[Tensor]) -> float:
    return max(distance(replica, expected) for replica in replicas)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return reference(loud_params(), batches())


def added_twice(data: list[Tensor]) -> None:
    """Control: the second loop adds where it should copy."""
    for i in range(1, len(data)):
        data[0].add_(data[i])
    for i in range(1, len(data)):
        data[i].add_(data[0])


def forgotten(data: list[Tensor]) -> None:
    """Control: nothing is exchanged."""


def after(allreduce: Callable, k: int) -> list[list[float]]:
    """What the caller's own tensors (1, 10), (2, 20), (3, 30), ... hold afterwards."""
    tensors = [torch.tensor([float(i), 10.0 * i]) for i in range(1, k + 1)]
    pointers = [t.data_ptr() for t in tensors]
    allreduce(list(tensors))
    assert [t.data_ptr() for t in tensors] == pointers
    return [t.tolist() for t in tensors]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_allreduce_gives_every_tensor_the_sum_and_what_is_wrong_does_not(k):
    total = k * (k + 1) / 2
    assert after(allreduce, k) == [[total, 10 * total]] * k
    for wrong in (added_twice, forgotten) if k > 1 else ():
        assert after(wrong, k) != [[total, 10 * total]] * k


def test_a_batch_is_split_in_order():
    X, y = torch.arange(12).view(12, 1), torch.arange(12)
    X_shards, y_shards = split_batch(X, y, [CPU] * 3)
    assert [part.tolist() for part in y_shards] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(torch.cat(X_shards), X)
    with pytest.raises(ValueError, match=r"12 .*\b5 devices"):
        split_batch(X, y, [CPU] * 5)


# float64: twenty steps of rounding, far below any mistake (measured: 6e-17 at weights of up to 0.5).
@pytest.mark.parametrize("k", [1, 2, 4])
def test_every_replica_is_the_network_trained_on_one_device(expected, k):
    replicas = by_hand(loud_params(), batches(), k)
    assert len(replicas) == k and farthest(replicas, expected) <= 1e-10


def test_the_weights_have_moved(expected):
    # else the comparison would hold for networks that never learned
    for p, q in zip(expected, loud_params(), strict=True):
        assert float((p - q).abs().max()) > 1e-3


@pytest.mark.parametrize("wrong", [added_twice, forgotten])
def test_wrong_sums_lead_elsewhere(expected, monkeypatch, wrong):
    monkeypatch.setattr(data_parallel, "allreduce", wrong)
    replicas = by_hand(loud_params(), batches(), 2)
    assert min(distance(replica, expected) for replica in replicas) > 1e-3


@pytest.mark.parametrize(("num", "k"), [(256, 8), (256, 1), (10, 4), (3, 8)])
def test_prediction_over_replicas_is_that_of_one(monkeypatch, num, k):
    X, shapes = next(batches(num=num))[0], []
    expected = lenet(X, loud_params())
    monkeypatch.setattr(
        data_parallel, "lenet", lambda X, params: shapes.append(tuple(X.shape)) or lenet(X, params)
    )
    logits = predict(X, [get_params(loud_params(), CPU) for _ in range(k)], [CPU] * k)
    assert not logits.requires_grad
    assert float((logits - expected).abs().max()) <= 1e-12  # the same sums, at most in other blocks
    assert len(shapes) == k and sum(shape[0] for shape in shapes) == num
    if num == 256:
        assert shapes == [(256 // k, 1, 28, 28)] * k


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("names", [["cuda:0"], ["cuda:0", "cuda:0"], ["cpu", "cuda:0"]])
def test_cuda_devices_compute_what_the_cpu_does(expected, names):
    devices = [torch.device(name) for name in names]
    device_params = [get_params(loud_params(), device) for device in devices]
    for X, y in batches():
        train_batch(X, y, device_params, devices, LR)
    for params, device in zip(device_params, devices, strict=True):
        assert all(p.device == device for p in params)
        assert distance([p.detach().cpu() for p in params], expected) <= 1e-10
