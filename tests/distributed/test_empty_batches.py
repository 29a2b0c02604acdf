"""The step of a rank without images: a loss that reaches every parameter and changes none."""

import pytest
import torch
from torch import nn

from finetune.distributed.global_loss import zero_loss
from finetune.training.loss import Target, loss_sum


def test_the_loss_of_no_image_reaches_every_parameter_that_trains_and_moves_none():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    network[0].requires_grad_(False)
    loss = zero_loss(network)
    loss.backward()
    assert loss == 0 and all(parameter.grad is None for parameter in network[0].parameters())
    for parameter in [*network[1].parameters(), *network[2].parameters()]:
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_loss_of_no_image_has_the_type_of_one_of_images(dtype):
    network = nn.Linear(3, 2).to(dtype)
    loss = zero_loss(network)
    logits, class_weight = torch.zeros(1, 2, dtype=dtype), torch.ones(2, dtype=dtype)
    # devices add them up
    assert loss.dtype == loss_sum(logits, Target(torch.tensor([0])), class_weight, 0.0).dtype
    loss.backward()
    assert network.weight.grad.equal(torch.zeros(2, 3, dtype=dtype))
