"""The timed parts of a step compute what the fit computes, and leave the fit unchanged."""

import copy
import time

import pytest
import pytorch_lightning as pl
import torch

from finetune import Classifier, ImageFolderData
from finetune.profiling.step_timing import StepParts, loading, reading


@pytest.fixture
def fit(colours):
    """A model and its data, attached to a trainer as in a fit, and a batch."""
    data = ImageFolderData(
        str(colours), batch_size=16, image_size=32, num_workers=0, val_fraction=0, cache_limit_gb=0
    )
    model = Classifier(data.class_names, "resnet18", weights=None)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False)
    data.trainer = model.trainer = trainer
    trainer.strategy.connect(model)
    trainer.datamodule = data
    return model, data, next(iter(data.loader("train", train=True)))


@pytest.mark.slow
def test_the_parts_leave_the_weights_alone_and_have_the_fits_loss(fit):
    model, _, batch = fit
    model.train()
    before = copy.deepcopy(dict(model.network.named_parameters()))
    parts = StepParts(model, batch)
    expected = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
    torch.testing.assert_close(parts.forward(), expected)
    parts.seconds(2)
    assert all(torch.equal(before[name], p) for name, p in model.network.named_parameters())
    assert all(p.grad is None for p in model.network.parameters())
    parts.optimizer.param_groups[0]["lr"] = 0.1  # the control: a rate above 0 changes them
    parts.seconds(1)
    assert not all(torch.equal(before[name], p) for name, p in model.network.named_parameters())


@pytest.mark.slow
def test_parts_are_measured_as_often_as_asked(fit):
    model, data, batch = fit
    parts = StepParts(model, batch).seconds(3)
    assert {name: len(seconds) for name, seconds in parts.items()} == {
        "forward": 3,
        "backward": 3,
        "optimizer": 3,
    }
    read = reading(data, 5, 2)
    # there is no cache
    assert {name: len(seconds) for name, seconds in read.items()} == {"decode": 2, "augment": 2}
    data.batch_size = 7
    assert len(loading(data, 7, 9)) == 9  # of several epochs of eight full batches


def test_a_data_set_of_two_batches_has_no_rate_of_loading(fit):
    _, data, _ = fit
    data.batch_size = 30
    assert loading(data, 30, 5) == []


@pytest.mark.slow
def test_batches_that_several_workers_read_at_once_count_one_by_one(fit, monkeypatch):
    """Two workers deliver two batches at a time, 0.2 seconds apart: 0.1 seconds each, not 0.2 and nothing."""
    _, data, _ = fit
    slow = [{"label": torch.zeros(7)}] * 12

    class Loader:
        num_workers = 2

        def __iter__(self):
            for i, batch in enumerate(slow):
                time.sleep(0.2 * (i % 2 == 0))
                yield batch

    monkeypatch.setattr(data, "loader", lambda *_, **__: Loader())
    seconds = loading(data, 7, 3)
    assert len(seconds) == 3
    assert all(0.08 < value < 0.16 for value in seconds)
