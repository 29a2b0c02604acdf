"""The plain loop beside which a fit is measured: it computes the same, and leaves the fit alone."""

import copy

import pytest
import pytorch_lightning as pl
import torch

from finetune import Classifier, ImageFolderData
from finetune.step_parts import PlainLoop, loading, reading


@pytest.fixture
def fit(colours):
    """A model and its data, attached to a trainer as in a fit, and a batch."""
    data = ImageFolderData(str(colours), batch_size=16, image_size=32, num_workers=0, val_fraction=0)
    model = Classifier(data.class_names, "resnet18", weights=None)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False)
    data.trainer = model.trainer = trainer
    trainer.strategy.connect(model)
    trainer.datamodule = data
    return model, data, next(iter(data.loader("train", train=True)))


def test_the_plain_loop_leaves_the_weights_alone_and_has_the_fits_loss(fit):
    model, _, batch = fit
    model.train()
    before = copy.deepcopy(dict(model.network.named_parameters()))
    plain = PlainLoop(model, batch)
    expected = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
    torch.testing.assert_close(plain.forward(), expected)
    assert plain.steps(2) > 0
    assert all(torch.equal(before[name], p) for name, p in model.network.named_parameters())
    assert all(p.grad is None for p in model.network.parameters())
    plain.optimizer.param_groups[0]["lr"] = 0.1  # and so it would be seen
    plain.step()
    assert not all(torch.equal(before[name], p) for name, p in model.network.named_parameters())


def test_parts_are_measured_as_often_as_asked(fit):
    model, data, batch = fit
    parts = PlainLoop(model, batch).parts(3)
    assert {name: len(seconds) for name, seconds in parts.items()} == {"forward": 3, "backward": 3, "optimizer": 3}
    read = reading(data, 5, 2)
    assert {name: len(seconds) for name, seconds in read.items()} == {"decode": 2, "augment": 2}  # there is no cache
    assert len(loading(data, 16, 5)) == 5  # of several epochs


def test_a_data_set_of_two_batches_has_no_rate_of_loading(fit):
    _, data, _ = fit
    data.batch_size = 30
    assert loading(data, 30, 5) == []
