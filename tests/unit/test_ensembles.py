"""Ensembles (`--members`): each network trains as it would alone, and together they give their mean probabilities."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenario_results import distance
from small_fits import data, fit
from torch import Tensor, nn

from finetune import Classifier
from finetune.models.ensemble import Ensemble, combine_logits
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
    assert torch.equal(output, combine_logits(network.train()(one), label_kind))
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


def test_members_answer_together_train_apart_and_are_frozen_each():
    model = build_image_classifier("resnet18_small", 2, members=2)
    images = torch.randint(0, 256, (3, 3, 28, 28), dtype=torch.uint8)
    each = model.train()(images)
    assert each.shape == (2, 3, 2)
    each[0].sum().backward()
    first, second = ([p.grad for p in member.parameters()] for member in model.members)
    assert all(grad is not None and grad.any() for grad in first[-2:])
    assert all(grad is None or not grad.any() for grad in second)
    single = build_image_classifier("resnet18_small", 2)
    names = [*single.network.state_dict()]
    assert [*model.network.state_dict()] == [
        f"members.{i}.{name}" for i in (0, 1) for name in names
    ]
    frozen = model.freeze("layer1")
    for network in model.members:
        assert any(module is network.layer1 for module in frozen)
        assert not any(p.requires_grad for p in network.layer1.parameters())
        assert all(p.requires_grad for p in network.layer2.parameters())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.1)


def classifier(**options: Any) -> Classifier:
    """A small residual network with batch norm."""
    torch.manual_seed(0)
    names = ["blue", "green", "red"]
    settings = {"weights": None, "optimizer": sgd, "head_lr_multiplier": 10, **options}
    return Classifier(names, "timm/test_resnet", **settings)


def copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def trained(model: Classifier, root: Any, mixed: dict[str, float], **options: Any) -> float:
    """Train for some steps, and return the last one's loss."""
    images = data(root, val_fraction=0, **mixed)
    # one step is in a second epoch
    trainer = fit(model, images, max_steps=6, max_epochs=-1, precision="64-true", **options)
    return float(trainer.callback_metrics["train/loss"])


WAYS = {
    "balanced": (
        {
            "class_weights": "balanced",
            "label_smoothing": 0.1,
            "layer_decay": 0.5,
            "decay_norm_and_bias": False,
        },
        {},
        {},
    ),
    "mixed": ({}, {"mixup": 0.4, "cutmix": 1.0}, {}),
    "clipped": ({}, {}, {"gradient_clip_val": 0.5}),  # the norm of the first gradients is above
    "clipped by value": (
        {},
        {},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ),
}
SLOW = ("clipped", "clipped by value")


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=pytest.mark.slow) if w in SLOW else w for w in WAYS]
)
def test_each_network_of_an_ensemble_trains_as_it_would_alone(colours, way):
    options, mixed, limits = WAYS[way]
    together = classifier(members=2, **options)
    begun = [copy(member) for member in together.image_classifier.members]
    assert distance(*begun) > 0.1  # two heads, and here two of everything
    loss = trained(together, colours, mixed, **limits)
    losses = []
    for member, before in zip(together.image_classifier.members, begun, strict=True):
        alone = classifier(**options)
        alone.network.load_state_dict(before)
        losses.append(trained(alone, colours, mixed, **limits))
        moved = distance({k: v.float() for k, v in copy(alone.network).items()}, before)
        apart = distance(copy(member), copy(alone.network))  # the statistics of batch norm too
        # float64 over six steps; weights move by far more than 1e-2
        assert moved > 1e-2 and apart < 1e-12
    # which is logged as one number, in float32
    assert loss == pytest.approx(sum(losses) / 2, rel=1e-6)


@pytest.mark.slow
def test_clip_changes_the_training_of_an_ensemble_and_a_value_of_0_does_not(colours):
    """The control of the rows above: there is something to clip."""
    ends = []
    for value in (None, 0.5, 0):
        model = classifier(members=2)
        trained(model, colours, {}, gradient_clip_val=value)
        ends.append(copy(model.network))
    assert distance(ends[0], ends[1]) > 1e-3 and distance(ends[0], ends[2]) == 0
