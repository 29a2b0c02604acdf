"""Fits on images with several labels, without the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from labelled_files import LABELS, LabelledFiles, draw_labelled
from promise import promise
from small_fits import fit
from tiers import sweep
from torch import nn

from finetune import Classifier
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.training.multilabel_calibration import MultilabelCalibration
from finetune.training.threshold import LabelAim

SMALL: dict[str, Any] = {"backbone": "small_cnn", "weights": None, "scheduler": None}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_labelled(tmp_path_factory.mktemp("labels"), train=64, test=20)


def data(root: Path, **options: Any) -> LabelledFiles:
    quick = {"image_size": 28, "batch_size": 12, "num_workers": 0, "augmentations": None}
    return LabelledFiles(str(root), **{**quick, "val_fraction": 0.25, **options})


def classifier(images: LabelledFiles, **options: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(images.class_names, label_kind=images.label_kind, **{**SMALL, **options})


def test_batches_have_a_row_of_labels_for_each_image(root):
    images = data(root, mixup=0.4)
    batch = next(iter(images.loader("train", train=True)))
    targets = images.splits["train"].targets.labels
    assert batch["label"].dtype == torch.float32 == batch["partner_label"].dtype
    np.testing.assert_array_equal(batch["label"], targets[batch["index"]])
    assert batch["partner_label"].shape == batch["label"].shape
    evaluated = next(iter(data(root).loader("val")))
    assert evaluated["label"].shape == (12, 4) and "share" not in evaluated
    assert not targets.any(axis=1).all()  # images without labels are among them


@pytest.mark.parametrize("mixed", [False, True])
def test_the_steps_are_those_of_a_plain_loop_with_binary_cross_entropy(root, mixed):
    options = {"mixup": 0.4, "cutmix": 1.0} if mixed else {}
    settings = {"class_weights": "balanced", "label_smoothing": 0.1}
    model = classifier(data(root), **settings, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    plain = classifier(data(root), **settings)
    plain.load_state_dict(model.state_dict())
    fit(model, data(root, **options), max_steps=5, precision="64-true")

    images = data(root, **options)
    labels = images.splits["train"].targets.labels
    positive_weights = torch.tensor((len(labels) - labels.sum(axis=0)) / labels.sum(axis=0))
    loss_of = nn.BCEWithLogitsLoss(pos_weight=positive_weights)
    plain.double().train()
    for module in plain.always_eval:
        module.eval()
    optimizer = torch.optim.SGD(plain.network.parameters(), lr=0.1)
    batches = [*images.loader("train", train=True)][:5]
    for batch in batches:
        wanted = batch["label"].double()
        if mixed:
            share = batch["share"].double()[:, None]
            wanted = share * wanted + (1 - share) * batch["partner_label"].double()
        optimizer.zero_grad()
        loss_of(plain(batch["image"]), wanted * 0.9 + 0.05).backward()
        optimizer.step()
    moved = 0.0
    start = classifier(data(root)).double().network.state_dict()
    for name, value in plain.network.state_dict().items():
        if not value.is_floating_point():
            continue
        torch.testing.assert_close(model.network.state_dict()[name], value, rtol=1e-6, atol=1e-7)
        moved = max(moved, float((value - start[name]).abs().max()))
    assert moved > 1e-3


def test_a_fit_trains_measures_and_calibrates(root):
    images = data(root)
    model = classifier(images, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    model.calibrator.aim = LabelAim("recall", 0.9)
    trainer = fit(model, images, max_epochs=15)
    metrics = trainer.callback_metrics
    assert metrics["val/mAP"] > 0.6 and metrics["train/f1_micro"] > 0.6
    assert {
        f"val/{name}" for name in ("f1_macro", "f1_micro", "exact_match", "hamming_distance")
    } <= set(metrics)
    assert {f"val/average_precision/{name}" for name in LABELS} <= set(metrics)
    calibration = model.calibration
    assert calibration.num_images == len(images.splits["val"]) and calibration.aim is not None
    tested = trainer.test(model, datamodule=images, verbose=False)[0]
    assert tested["test/calibration_error"] != tested["test/calibration_error_before_scaling"]
    outputs = trainer.predict(model, images.loader("test"))
    p = torch.cat([output["probabilities"] for output in outputs])
    decisions = torch.cat([output["class"] for output in outputs])
    assert p.dtype == torch.float64 and decisions.dtype == torch.bool and p.shape == (20, 4)
    assert torch.equal(decisions, p >= torch.tensor(calibration.thresholds))
    hits = (decisions == torch.from_numpy(images.splits["test"].targets.labels > 0)).all(dim=1)
    assert tested["test/exact_match"] == pytest.approx(float(hits.float().mean()))


class SaveInside(pl.Callback):
    """Saves a checkpoint after the third of four steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


@promise("class-weights")
@pytest.mark.slow
def test_weights_as_text_are_those_of_balanced_bit_for_bit(root):
    balanced = classifier(data(root), class_weights="balanced")
    fit(balanced, data(root))
    pairs = zip(balanced.class_names, balanced.class_weight.tolist(), strict=True)
    listed = ",".join(f"{name}:{weight!r}" for name, weight in pairs)
    by_text = classifier(data(root), class_weights=listed)
    fit(by_text, data(root))
    for name, value in balanced.state_dict().items():
        assert torch.equal(value, by_text.state_dict()[name]), name
    plain = classifier(data(root))
    fit(plain, data(root))
    parameters = zip(plain.network.parameters(), by_text.network.parameters(), strict=True)
    assert not all(torch.equal(*pair) for pair in parameters)  # the control


@promise("resume")
@pytest.mark.parametrize("is_inside", sweep([False, True], quick=[True]))
def test_a_resumed_fit_ends_as_an_uninterrupted_one(root, tmp_path, is_inside):
    options = {"mixup": 0.4, "cutmix": 1.0}
    full = classifier(data(root), class_weights="balanced")
    fit(full, data(root, **options), max_epochs=2)
    first = classifier(data(root), class_weights="balanced")
    path = tmp_path / "first.ckpt"
    trainer = fit(first, data(root, **options), callbacks=[SaveInside(path)] if is_inside else [])
    if not is_inside:
        trainer.save_checkpoint(path)
    resumed = classifier(data(root), class_weights="balanced")
    fit(resumed, data(root, **options), path, max_epochs=2)
    for name, value in full.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert full.calibration == resumed.calibration
    assert not torch.equal(full.state_dict()["class_weight"], torch.ones(4))
    # the control: half of the fit is not all of it
    pairs = zip(first.network.parameters(), full.network.parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs)


def test_a_frozen_backbone_has_the_exact_head(root):
    images = data(root)
    model = classifier(images, freeze="backbone", head_init="probe")
    trainer = fit(model, images, max_epochs=3)
    assert trainer.callback_metrics["val/mAP"] > 0.6
    assert trainer.callback_metrics["train/loss_epoch"] < 0.7
    assert model.calibration.num_images == len(images.splits["val"])


def test_a_fit_from_a_fitted_head_knows_the_start(root, caplog):
    images = data(root)
    model = classifier(images, head_init="probe")
    with caplog.at_level("INFO"):
        fit(model, images, max_steps=0)
    assert f", val/mAP {model.start_score:.4f}" in caplog.text
    assert "cross-validated mAP 0." in caplog.text
    measured = fit(model, images, max_epochs=0)
    found = measured.validate(model, datamodule=images, verbose=False)[0]["val/mAP"]
    assert found == pytest.approx(model.start_score, abs=2e-3)


@pytest.mark.parametrize("members", sweep([1, 2], quick=[1]))
def test_a_checkpoint_predicts_with_its_thresholds(root, tmp_path, members):
    images = data(root)
    model = classifier(images, members=members)
    trainer = fit(model, images, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert checkpoint["hyper_parameters"]["label_kind"] == "several"
    predictor = Predictor(tmp_path / "last.ckpt")
    assert predictor.label_kind == "several"
    assert predictor.calibration == model.calibration
    assert isinstance(predictor.calibration, MultilabelCalibration)
    outputs = trainer.predict(model, images.loader("test"))
    sample_images = [images.splits["test"].read(i) for i in range(12)]
    p = predictor(sample_images)
    np.testing.assert_allclose(p, outputs[0]["probabilities"], atol=1e-6)
    np.testing.assert_array_equal(predictor.decide(p), outputs[0]["class"])
    assert json.dumps(model.calibration.as_plain())  # plain values


def test_members_average_their_probabilities(root):
    images = data(root)
    model = classifier(images, members=2).eval()
    batch = next(iter(images.loader("test")))["image"]
    each = [
        member(model.image_classifier.normalized(batch)).sigmoid()
        for member in model.image_classifier.members
    ]
    torch.testing.assert_close(model(batch).sigmoid(), torch.stack(each).mean(dim=0))
    torch.testing.assert_close(
        model.task.combined(torch.stack([p.logit() for p in each])),
        model(batch),
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_standard_error_of_the_mean_average_precision(root):
    task = classifier(data(root)).task
    targets = data(root).splits["val"].targets
    counts = targets.counts()
    assert (counts > 0).all()
    value = 0.7
    # that of a mean of independent shares of the images of each label
    expected = np.sqrt((value * (1 - value) / counts).sum()) / len(counts)
    assert task.standard_error(value, task.num_trials(targets)) == pytest.approx(expected)
    assert task.standard_error(value, 0) == 0
