"""Ensembles: several networks together give the mean of their probabilities."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from scenario_results import distance
from torch import Tensor, nn

from finetune.models.ensemble import Ensemble
from finetune.models.image_classifier import build_image_classifier

MEAN = {"single": lambda each: each.softmax(2), "several": lambda each: each.sigmoid()}


class Says(nn.Module):
    """Answers with these logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits * x


def answered(logits: Tensor, label_kind: str) -> Tensor:
    """The probabilities of the ensemble of networks that say these logits (M, B, K)."""
    network = Ensemble([Says(own) for own in logits], label_kind).to(logits.dtype).eval()
    one = torch.ones((), dtype=logits.dtype)
    output = network(one)
    assert torch.equal(output, network.train()(one))
    return output.exp() if label_kind == "single" else output.sigmoid()


@given(
    kind=st.sampled_from(sorted(MEAN)),
    shape=st.tuples(st.integers(2, 32), st.integers(1, 4), st.integers(2, 5)),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**32),
)
def test_an_ensemble_gives_the_mean_of_the_probabilities(kind, shape, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    # float64 rounds at 1e-16, and probabilities are at most 1.
    assert distance({"": answered(logits, kind)}, {"": MEAN[kind](logits).mean(0)}) < 1e-14


def test_probabilities_of_an_ensemble_that_float32_can_not_hold_are_no_nan():
    logits = torch.tensor([[300.0, 0.0], [-300.0, 300.0]])
    output = Ensemble([Says(logits), Says(logits)]).eval()(torch.ones(()))
    torch.testing.assert_close(output, torch.tensor([[0.0, -300.0], [-600.0, 0.0]]))


def test_an_ensemble_under_autocast_to_bf16_averages_in_float32():
    torch.manual_seed(0)
    network = Ensemble([nn.Linear(9, 4) for _ in range(4)]).eval()
    x = 20 * torch.randn(5, 9)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        each = torch.stack([member(x) for member in network.members])
        output = network(x)
    assert each.dtype == torch.bfloat16 and output.dtype == torch.float32
    exact = each.double().softmax(2).mean(0)
    # float32 keeps 24 bits of logits of some tens: 1e-5 at most. The control is averaged in bf16, which keeps 8.
    assert distance({"": output.double().exp()}, {"": exact}) < 1e-5
    rounded = each.log_softmax(2).bfloat16().logsumexp(0) - math.log(4)
    assert distance({"": rounded.double().exp()}, {"": exact}) > 1e-3


def test_an_ensemble_has_the_weights_of_each_network_and_freezes_each():
    model = build_image_classifier("resnet18_small", 2, members=2)
    names = [*build_image_classifier("resnet18_small", 2).network.state_dict()]
    assert [*model.network.state_dict()] == [
        f"members.{i}.{name}" for i in (0, 1) for name in names
    ]
    frozen = model.freeze("layer1")
    for network in model.members:
        assert any(module is network.layer1 for module in frozen)
        assert not any(p.requires_grad for p in network.layer1.parameters())
        assert all(p.requires_grad for p in network.layer2.parameters())
