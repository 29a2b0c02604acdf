"""Gradient clipping by norm: each network by its own norm, also if several train in one fit."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from scenario_results import distance
from small_fits import data, fit
from test_members import classifier, copy

from finetune import Classifier

NORM = 0.5  # that of the first gradients is 4


def trained(model: Classifier, root: Any, **clipping: Any) -> dict[str, torch.Tensor]:
    fit(
        model,
        data(root, val_fraction=0),
        max_steps=6,
        max_epochs=-1,
        precision="64-true",
        **clipping,
    )
    return copy(model.network)


def by_the_norm_of_all() -> Any:
    """Control: as Lightning clips."""
    own = pl.LightningModule.configure_gradient_clipping
    return patch.object(Classifier, "configure_gradient_clipping", own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "is_right"), [("norm", True), ("norm", False), ("value", True)]
)
def test_a_member_is_clipped_as_it_would_be_alone(colours, algorithm, is_right):
    clipping = {
        "gradient_clip_val": NORM if algorithm == "norm" else 0.02,
        "gradient_clip_algorithm": algorithm,
    }
    together = classifier(members=2)
    begun = [copy(member) for member in together.image_classifier.members]
    with nullcontext() if is_right else by_the_norm_of_all():
        trained(together, colours, **clipping)
    for member, before in zip(together.image_classifier.members, begun, strict=True):
        alone, free = classifier(), classifier()
        alone.network.load_state_dict(before)
        free.network.load_state_dict(before)
        clipped = trained(alone, colours, **clipping)
        assert distance(clipped, trained(free, colours)) > 1e-3  # there was something to clip
        apart = distance(copy(member), clipped)
        assert apart < 1e-12 if is_right else apart > 1e-4  # float64 over six steps


def test_one_network_is_clipped_as_by_lightning(colours):
    ours, theirs = (classifier(), classifier())
    trained(ours, colours, gradient_clip_val=NORM)
    with by_the_norm_of_all():
        trained(theirs, colours, gradient_clip_val=NORM)
    assert distance(copy(ours.network), copy(theirs.network)) == 0


@pytest.mark.parametrize("value", [None, 0, -1.0])
def test_what_clips_nothing_of_one_clips_nothing_of_several(colours, value):
    clipped, free = classifier(members=2), classifier(members=2)
    assert distance(trained(clipped, colours, gradient_clip_val=value), trained(free, colours)) == 0


def test_what_lightning_refuses_to_clip_is_refused_of_several_too():
    """An optimizer that unscales gradients itself has no gradients to clip before its step."""
    model = classifier(members=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer._step_supports_amp_scaling = True  # as of fused ones
    scaler = torch.amp.GradScaler("cpu")
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    model.trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        model.configure_gradient_clipping(optimizer, 1.0, "norm")
