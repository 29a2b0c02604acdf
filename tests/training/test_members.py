"""The networks of an ensemble train on the same images, each as it would alone."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ddp_scenarios import small_normalised
from scenario_results import distance
from small_fits import data, fit

from finetune import Classifier
from finetune.models.ensemble import member_label
from finetune.system.messages import WrongUsage


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.1)


def classifier(**options: Any) -> Classifier:
    torch.manual_seed(0)
    with patch("finetune.models.image_classifier.build", small_normalised):
        return Classifier(
            ["blue", "green", "red"], weights=None, optimizer=sgd, head_lr_multiplier=10, **options
        )


def copy(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def trained(model: Classifier, root: Any, **options: Any) -> float:
    """Train for some steps, and return the last one's loss."""
    images = data(root, val_fraction=0, **options)
    # one step is in a second epoch
    trainer = fit(model, images, max_steps=6, max_epochs=-1, precision="64-true")
    return float(trainer.callback_metrics["train/loss"])


OPTIONS = [
    {},
    {
        "class_weights": "balanced",
        "label_smoothing": 0.1,
        "layer_decay": 0.5,
        "decay_norm_and_bias": False,
    },
]


def of_the_mean() -> Any:
    """Control: the mean of the members' losses, as if they were one network."""
    step = Classifier.training_step
    return patch.object(
        Classifier,
        "training_step",
        lambda self, *given: step(self, *given) / len(self.image_classifier.members),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "balanced"])
@pytest.mark.parametrize("is_right", [True, False])
def test_each_trains_as_it_would_alone(colours, options, is_right):
    together = classifier(members=2, **options)
    begun = [copy(member) for member in together.image_classifier.members]
    assert distance(*begun) > 0.1  # two heads, and here two of everything
    with nullcontext() if is_right else of_the_mean():
        loss = trained(together, colours)
    losses = []
    for member, before in zip(together.image_classifier.members, begun, strict=True):
        alone = classifier(**options)
        alone.network.load_state_dict(before)
        losses.append(trained(alone, colours))
        moved = distance({k: v.float() for k, v in copy(alone.network).items()}, before)
        apart = distance(copy(member), copy(alone.network))  # the statistics of batch norm too
        # float64 over six steps; weights move by far more than 1e-2, and half a gradient is no rounding.
        assert moved > 1e-2 and (apart < 1e-12 if is_right else apart > 1e-4)
    if is_right:
        # which is logged as one number, in float32
        assert loss == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_mixed_images_are_the_same_for_each(colours):
    mixed = {"mixup": 0.4, "cutmix": 1.0}
    together = classifier(members=2)
    begun = copy(together.image_classifier.members[1])
    trained(together, colours, **mixed)
    alone = classifier()
    alone.network.load_state_dict(begun)
    trained(alone, colours, **mixed)
    assert distance(copy(together.image_classifier.members[1]), copy(alone.network)) < 1e-12


def test_one_member_is_the_network_that_it_ever_was(colours):
    a, b = classifier(), classifier(members=1)
    trained(a, colours)
    trained(b, colours)
    assert type(a.network) is type(b.network) is torch.nn.Sequential
    assert distance(copy(a.network), copy(b.network)) == 0


def test_each_member_s_stages_are_frozen(colours):
    # the first convolution and its batch norm
    model = classifier(members=2, freeze="1", freeze_batch_norm=False)
    before = copy(model.network)
    trainer = fit(model, data(colours, val_fraction=0))
    still = {
        name
        for name, value in model.network.state_dict().items()
        if torch.equal(value, before[name])
    }
    # all else did move
    assert still == {name for name in before if name.split(".")[2] in ("0", "1")}
    assert {name.split(".")[1] for name in still} == {"0", "1"}
    (optimizer,) = trainer.optimizers
    names = {id(parameter): name for name, parameter in model.network.named_parameters()}
    assert {names[id(p)] for p in optimizer.state} == set(names.values()) - still


def test_it_is_described_by_how_often():
    assert (member_label("lenet", 1), member_label("lenet", 3)) == ("lenet", "3 × lenet")


@pytest.mark.parametrize(
    "options", [{"members": 0}, {"members": 33}, {"members": 2, "head_init": "probe"}]
)
def test_what_can_not_be_is_refused_before_a_network_is_made(options):
    with (
        patch("finetune.models.image_classifier.build", side_effect=AssertionError),
        pytest.raises(WrongUsage),
    ):
        Classifier(["a", "b"], weights=None, **options)
