"""A network whose branches are on two devices equals the network on one; wrong variants are caught."""

import copy

import pytest
import torch
import torch.nn.functional as F
from model_parallel_scenarios import (
    TOLERANCE,
    WRONG,
    draw,
    train,
)
from scenario_results import distance
from torch import Tensor

from finetune.parity.branches import Branches, Siamese
from finetune.parity.communication_volume import branches_bytes


def pairs() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.stack([x, x.roll(1, 0)]), (y % 2).double()) for x, y in draw(10, 4, 140, 256)]


def trained_branches(network: Siamese) -> Branches:
    branches = Branches(network, ["cpu", "cpu"])
    train(branches.step, branches.parameters(), pairs(), 0.1)
    return branches


@pytest.fixture
def siamese() -> Siamese:
    torch.manual_seed(0)
    return Siamese().double()


@pytest.mark.slow
def test_branches_train_what_one_device_does(siamese):
    branches = trained_branches(siamese)

    # One LSTM, called twice: autograd does the sum. The loss is that of the text: a sigmoid, then cross-entropy.
    lstm, dense = siamese.lstm, siamese.dense

    def step(x: Tensor, y: Tensor) -> None:
        encoded = torch.cat([lstm(x[0])[0][:, -1], lstm(x[1])[0][:, -1]], dim=1)
        F.binary_cross_entropy(torch.sigmoid(dense(encoded)).flatten(), y).backward()

    start = copy.deepcopy(siamese.state_dict())
    train(step, siamese.parameters(), pairs(), 0.1)
    assert distance(start, siamese.state_dict()) > 1e-3
    assert distance(siamese.state_dict(), branches.full_state()) <= TOLERANCE
    x, _ = pairs()[0]
    with torch.no_grad():
        torch.testing.assert_close(branches(x), siamese(x), atol=TOLERANCE, rtol=0)
    for lstm in branches.copies:  # both, not only the first
        assert distance(siamese.lstm.state_dict(), lstm.state_dict()) <= TOLERANCE


def test_copies_own_their_weights(siamese):
    branches = Branches(siamese, ["cpu", "cpu"])
    addresses = [
        p.untyped_storage().data_ptr()
        for network in (siamese, branches)
        for p in network.parameters()
    ]
    assert len(addresses) == len(set(addresses)) == 6 + 2 * 4 + 2


@pytest.mark.slow
def test_copies_part_without_the_sum(siamese, monkeypatch):
    monkeypatch.setattr("finetune.parity.branches.allreduce", lambda gradients: None)
    first, second = trained_branches(siamese).copies
    assert distance(first.state_dict(), second.state_dict()) > WRONG


def test_branches_need_two_devices(siamese):
    with pytest.raises(ValueError, match="two devices, not 3"):
        Branches(siamese, ["cpu"] * 3)


def test_branches_send_gradients_and_outputs(siamese):
    assert branches_bytes(siamese, 4) == [(4 * 64 * (256 + 64 + 2) + 4 * 64) * 8] * 2
