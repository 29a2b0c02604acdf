"""Several networks that predict together: the mean of their probabilities, in the precision of the ensemble."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from finetune.models.ensemble import MAX_MEMBERS, Ensemble, check_members, combine_logits
from finetune.system.messages import WrongUsage


def make() -> nn.Module:
    convolution = nn.Conv2d(3, 8, 3, bias=False)
    layers = (
        convolution,
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return nn.Sequential(*layers)


def of(num: int, make: Callable[[], nn.Module] = make) -> nn.Module:
    torch.manual_seed(0)
    network = make() if num == 1 else Ensemble([make() for _ in range(num)])
    with torch.no_grad():
        for member in members(network):
            member[-1].weight.mul_(20)  # or all would say nearly the same
    return network.eval()


def members(network: nn.Module) -> list[nn.Module]:
    return [*network.members] if isinstance(network, Ensemble) else [network]


def images(num: int = 5) -> Tensor:
    return torch.randn(num, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("num", [2, 3, MAX_MEMBERS])
def test_it_says_the_mean_of_the_probabilities(num):
    network, x = of(num).double(), images().double()
    each = torch.stack([member(x) for member in members(network)])
    output = network(x)
    assert len(each) == num and output.shape == (5, 4) and output.dtype == torch.float64
    # float64 rounds at 1e-16, and probabilities are at most 1.
    assert distance(output.exp(), each.softmax(2).mean(0)) < 1e-14
    # they are logarithms, and no other logits
    assert distance(output.exp().sum(1), torch.ones(5)) < 1e-14
    # The controls: the mean of the logits, and what one says.
    for wrong in (each.mean(0).softmax(1), each[0].softmax(1)):
        assert distance(output.exp(), wrong) > 1e-2


def test_in_training_each_answers_for_itself():
    network, x = of(3), images()
    alone = torch.stack([member.train()(x) for member in members(network)])
    each = network.train()(x)
    assert torch.equal(each, alone) and each.shape == (3, 5, 4)
    assert distance(combine_logits(each).exp(), each.softmax(2).mean(0)) < 1e-6
    logits = of(1)(x)
    assert logits.shape == (5, 4) and combine_logits(logits) is logits


def test_the_gradient_of_one_does_not_reach_another():
    network = of(2).train()
    network(images())[0].sum().backward()
    first, second = ([p.grad for p in member.parameters()] for member in members(network))
    assert all(grad is not None and grad.any() for grad in first[-2:])
    assert all(grad is None or not grad.any() for grad in second)


def test_a_probability_that_float32_can_not_hold_is_no_nan():
    class Sure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([[300.0, 0.0], [-300.0, 300.0]])

    output = Ensemble([Sure(), Sure()]).eval()(images())
    torch.testing.assert_close(output, torch.tensor([[0.0, -300.0], [-600.0, 0.0]]))


def test_under_autocast_to_bf16_the_mean_is_of_float32():
    network, x = of(4), images()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        each, output = torch.stack([member(x) for member in members(network)]), network(x)
    assert each.dtype == torch.bfloat16 and output.dtype == torch.float32
    exact = each.double().softmax(2).mean(0)
    # float32 keeps 24 bits of logits of some tens: 1e-5 at most. The control is averaged in bf16, which keeps 8.
    assert distance(output.double().exp(), exact) < 1e-5
    rounded = each.log_softmax(2).bfloat16().logsumexp(0) - math.log(4)
    assert distance(rounded.double().exp(), exact) > 1e-3


def test_what_is_saved_are_the_members():
    network = of(2)
    names = [*make().state_dict()]
    assert [*network.state_dict()] == [f"members.{i}.{name}" for i in range(2) for name in names]
    assert [*of(1).state_dict()] == names  # a single network is itself, as it ever was
    single = of(1)
    assert not isinstance(single, Ensemble)


@pytest.mark.parametrize("num", [0, -1, MAX_MEMBERS + 1, 10**9, True, 2.0, "3", None])
def test_what_is_no_number_of_members_is_refused(num):
    with pytest.raises(
        WrongUsage, match=rf"^model.members must be a whole number from 1 to 32, not {num!r}$"
    ):
        check_members(num, "xavier")


def test_heads_that_would_be_alike_are_refused():
    for head_init in ("source", "probe"):
        check_members(1, head_init)
        with pytest.raises(
            WrongUsage,
            match=f"members differ by their random heads, which model.head_init {head_init} makes",
        ):
            check_members(2, head_init)
    for num in (1, 2, MAX_MEMBERS):
        check_members(num, "xavier")
