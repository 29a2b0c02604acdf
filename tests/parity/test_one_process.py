"""The ways that need no processes: data, initial weights, timing, differences."""

import math

import pytest
import torch

from finetune.data.samplers import train_order
from finetune.parity import one_process
from finetune.parity.data_parallel import lenet
from finetune.parity.one_process import Job, distance


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path, k=2, steps=3, dtype="float64", is_cuda=False, batch_size=8)


def test_batches_are_all_images_once_in_the_order_of_training(job):
    batches = one_process.draw_batches(job)
    assert [tuple(x.shape) for x, _ in batches] == [(8, 3, 28, 28)] * 3
    labels = [int(y) for _, batch in batches for y in batch]
    # images lie sorted by class: class 0 has numbers 0, 10 and 20, so the first three of the list
    assert labels == [sorted(i % 10 for i in range(24))[i] for i in train_order(24, 0, 0)]


def test_one_device_is_what_is_written_out_by_hand(job):
    start, batches = one_process.initial_network("lenet", job), one_process.draw_batches(job)
    found = one_process.on_one_device(start, batches, torch.device("cpu")).states[0]
    params = [p.detach().clone() for p in start.state_dict().values()]
    params = [(p.T if p.dim() == 2 else p).requires_grad_() for p in params]
    for x, y in batches:
        grey = x.double().mean(dim=1, keepdim=True) / 255
        loss = -lenet(grey, params).log_softmax(1)[range(8), y].mean()
        for p, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.data -= 0.1 * gradient
    by_name = dict(
        zip(found, [p.detach().T if p.dim() == 2 else p.detach() for p in params], strict=True)
    )
    assert distance(found, by_name) <= 1e-12  # float64, three steps
    assert distance(found, start.state_dict()) > 1e-3


def test_the_start_is_written_for_other_processes(job, tmp_path):
    network = one_process.initial_network("small_cnn", job)
    written = torch.load(tmp_path / "small_cnn.pt", weights_only=True)
    assert all(value.dtype == torch.float32 for value in written.values())
    assert distance(network.state_dict(), written) == 0


@pytest.mark.slow
def test_branches_train(job):
    start, one, two = one_process.branches(job)
    assert (
        len(two.states) == 2
        and max(distance(state, one.states[0]) for state in two.states) <= 1e-10
    )
    assert distance(one.states[0], start.state_dict()) > 1e-3


def test_distance_is_the_largest_and_nan_is_infinite():
    a, b = (
        {"x": torch.tensor([1.0, 2.0]), "y": torch.zeros(1)},
        {"x": torch.tensor([1.5, 2.0]), "y": torch.zeros(1)},
    )
    assert distance(a, b) == 0.5
    assert distance(a, {**b, "y": torch.tensor([math.nan])}) == math.inf


def test_the_first_step_is_not_timed():
    assert one_process.median([9.0, 1.0, 2.0, 3.0]) == 2.0 and one_process.median([9.0]) == 9.0
