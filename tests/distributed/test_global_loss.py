"""The loss of a step over several ranks is that of one rank with all images."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from finetune.distributed.global_loss import GlobalLoss

WEIGHTS = ([1.0, 2.0, 2.0], [5.0], [])  # of the images of each rank


@pytest.fixture
def ranks(monkeypatch):
    """Return the sum of a value over ranks that run one after the other, in place of a process group."""
    totals: list[float] = []
    monkeypatch.setattr(dist, "all_reduce", lambda value: value.fill_(totals[-1]))
    return totals


def losses(w: Tensor) -> list[Tensor]:
    """Weighted losses of each rank's images, quadratic in a weight of the network."""
    images = iter(range(1, 10))
    return [
        sum((weight * (w - next(images)) ** 2 for weight in own), start=0 * w) for own in WEIGHTS
    ]


def gradient(loss: Tensor, w: Tensor) -> float:
    return float(torch.autograd.grad(loss, w, retain_graph=True)[0])


def test_ranks_together_take_the_step_of_one(ranks):
    w = torch.tensor(0.5, requires_grad=True)
    total = sum(map(sum, WEIGHTS))
    alone = sum(losses(w), start=0 * w) / total
    own, parts = [], []
    for rank, weights in enumerate(WEIGHTS):
        ranks.append(total)
        global_loss = GlobalLoss.of_ranks(torch.tensor(sum(weights)), len(WEIGHTS))
        loss = global_loss.loss(losses(w)[rank])
        parts.append(float(loss.detach()))
        own.append(gradient(loss, w))
    # DDP averages the gradients
    assert sum(own) / len(WEIGHTS) == pytest.approx(gradient(alone, w))
    ranks.append(sum(parts))
    assert float(global_loss.mean(loss)) == pytest.approx(float(alone.detach()))
    # control: the mean of the means of the ranks
    means = [
        loss / sum(weights) for loss, weights in zip(losses(w), WEIGHTS, strict=True) if weights
    ]
    wrong = [gradient(mean, w) for mean in means]
    assert abs(sum(wrong) / len(WEIGHTS) - gradient(alone, w)) > 0.1


def test_one_rank_asks_nobody(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda value: pytest.fail("there is no other rank"))
    global_loss = GlobalLoss.of_ranks(torch.tensor(4.0), 1)
    loss = global_loss.loss(torch.tensor(6.0, requires_grad=True))
    assert float(loss.detach()) == 1.5 and loss.requires_grad
    mean = global_loss.mean(loss)
    assert float(mean) == 1.5 and not mean.requires_grad
