"""--head_init probe: the head that is fitted on the features of the backbone before training."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from colours import draw_colours, draw_patients
from small_fits import data, fit

from finetune import Classifier
from finetune.features import linear_probe

SMALL = {"backbone": "small_cnn", "weights": None, "scheduler": None}
data = partial(data, image_size=28)


@pytest.mark.slow
def test_a_probe_starts_where_the_features_distinguish_the_classes(colours):
    images = data(colours)
    accuracy = {}
    for start in ("probe", "xavier"):
        torch.manual_seed(0)
        model = Classifier(images.class_names, **SMALL, head_init=start)
        fit(model, images, max_steps=0)
        (batch, *_) = data(colours, batch_size=64).loader("test")
        with torch.no_grad():
            predicted = model.eval()(batch["image"]).argmax(1)
        accuracy[start] = float((predicted == batch["label"]).float().mean())
    assert accuracy["probe"] > 0.9  # the random backbone sees colours
    assert accuracy["xavier"] < 0.7


def test_near_copies_of_one_patient_do_not_raise_the_cross_validated_accuracy(tmp_path, caplog):
    """Pixels say which patient it is, but nothing about the class: half of the predictions are right by chance."""
    images = data(draw_patients(tmp_path), group_by="folder", val_fraction=0, test_fraction=0)
    torch.manual_seed(0)
    model = Classifier(images.class_names, **SMALL, head_init="probe")
    with caplog.at_level("INFO"):
        fit(model, images, max_steps=0)
    score = float(re.search(r"cross-validated accuracy ([\d.]+)", caplog.text)[1])
    assert score < 0.75  # 24 patients: 2.4 deviations above chance


@pytest.mark.parametrize("weights", ["balanced", "blue:2,red:0.5"])
def test_class_weights_count_in_the_probe_as_in_training(colours, weights, monkeypatch):
    given = []
    fit_probe = linear_probe.fit_probe

    def keep(*args, **options):
        given.append(options["class_weights"])
        return fit_probe(*args, **options)

    monkeypatch.setattr(linear_probe, "fit_probe", keep)
    images = data(colours)
    split = images.splits["train"]
    rare = np.flatnonzero((split.targets.labels != 0) | (np.arange(len(split)) < 3))
    images.splits["train"] = split.take(rare)
    images.scanned = replace(images.scanned, seen=None)  # the record of all of them
    model = Classifier(images.class_names, **SMALL, head_init="probe", class_weights=weights)
    fit(model, images, max_steps=0)
    counts = images.splits["train"].targets.counts()
    assert counts[0] == 3 and min(counts[1:]) > 15
    by_text = np.array([2.0, 1.0, 0.5])
    balanced = counts.sum() / (3 * counts)
    expected = balanced if weights == "balanced" else by_text
    np.testing.assert_allclose(given, [expected], rtol=1e-6)  # they are float32 in training, too


@pytest.mark.slow
def test_probe_is_not_fitted_again_on_resume(colours, tmp_path: Path):
    images = data(colours)
    model = Classifier(images.class_names, **SMALL, head_init="probe")
    trainer = fit(model, images)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with patch("finetune.features.linear_probe.probe_head", side_effect=AssertionError):
        again = Classifier(images.class_names, **SMALL, head_init="probe")
        resumed = fit(again, data(colours), tmp_path / "one.ckpt", max_epochs=2)
        assert resumed.current_epoch == 2
        with pytest.raises(AssertionError):  # the control: a new run would fit it
            fit(Classifier(images.class_names, **SMALL, head_init="probe"), data(colours))


def test_images_that_cannot_be_learned_from_are_refused(colours, tmp_path):
    root = draw_colours(tmp_path / "broken", train=3)
    for path in root.rglob("*.png"):
        path.write_bytes(b"broken")
    images = data(root, val_fraction=0, on_bad_image="skip")
    with pytest.raises(ValueError, match=f"{root} has no training image"):
        fit(Classifier(images.class_names, **SMALL, head_init="probe"), images)
    images = data(colours)
    first = re.escape(images.splits["train"].paths[0])
    for value in (np.nan, np.inf):
        model = Classifier(images.class_names, **SMALL, head_init="probe")
        with torch.no_grad():
            next(model.network.parameters()).fill_(value)
        with pytest.raises(ValueError, match=f"not finite .* for example {first}"):
            fit(model, images, max_steps=0)
