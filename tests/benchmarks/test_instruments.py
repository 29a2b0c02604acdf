"""What the scripts measure with: it sees all that it is to see, and leaves alone what it measures."""

import json
import sys

import pytest
import torch
from small_fits import data, fit

from benchmarks.peers import measure
from benchmarks.techniques import documents, watch
from finetune import Classifier

pytestmark = pytest.mark.slow


def test_the_clock_sees_every_optimizer_step_and_no_other_process(tmp_path):
    """Rates of all tools are taken from these times."""
    code = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
for optimizer in (torch.optim.SGD([weight], 0.1), torch.optim.AdamW([weight])):
    weight.sum().backward()
    optimizer.step()
"""
    done = measure.run([sys.executable, "-c", code], {}, tmp_path / "log")
    assert len(done["stamps"]) == 2
    assert 0 < done["stamps"][0] <= done["stamps"][1] < done["seconds"]
    assert measure.run([sys.executable, "-c", "print(1)"], {}, tmp_path / "other")["stamps"] == []


def test_the_watch_says_what_validation_says_and_leaves_the_fit_alone(
    colours, tmp_path, monkeypatch
):
    monkeypatch.setenv(watch.FILE, str(tmp_path / "right.json"))
    monkeypatch.setattr(watch, "LARGER", (1,))
    states = []
    for callbacks in ([watch.Watch()], []):
        torch.manual_seed(0)
        images = data(colours)
        model = Classifier(images.class_names, "mobilenet_v3_small", weights=None)
        trainer = fit(model, images, max_epochs=2, callbacks=callbacks)
        states.append({name: value.clone() for name, value in model.network.state_dict().items()})
        accuracy = float(trainer.callback_metrics["val/accuracy"])
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    right = json.loads((tmp_path / "right.json").read_text())["right"]
    assert documents.right(right["epoch 2"]).mean() == pytest.approx(accuracy)
    assert right["× 1"] == right["epoch 2"]
    assert {"epoch 1", "ema 0.9", "mean of 2", "flip", "five crops", "whole"} <= right.keys()
