"""One label and several labels an image: fits by tables of the same columns, for each kind."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from colours import QUICKEST, draw_colours
from labelled_files import LABELS, draw_labelled
from probabilities import probabilities
from promise import control, promise
from scenario_results import distance
from small_fits import fit
from tiers import sweep
from torch import Tensor, nn

from finetune import Classifier, ImageFolderData
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.training.calibration import Calibration, read_calibration
from finetune.training.threshold import Choice

KINDS = ["single", "several"]
QUICK = {"image_size": 28, "num_workers": 0, "augmentations": None}
# The same images in each step, in a network without batch norm. What is left are the weights.
WHOLE = {
    **QUICK,
    "batch_size": 100,
    "crop_and_flip": False,
    "val_fraction": 0,
    "test_fraction": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("labels")
    draw_colours(place / "single", train=21, test=7)
    draw_labelled(place / "several", train=64, test=20)
    return place


def rows_of(place: Path, kind: str, split: str = "train") -> list[tuple[str, str]]:
    """The path and the labels of each image."""
    paths = sorted((place / kind / split).rglob("*.png"))
    if kind == "several":
        return [(str(path), ";".join(path.stem.split("+")[1:])) for path in paths]
    return [(str(path), path.parent.name) for path in paths]


def write(path: Path, rows: list[tuple], *more: str) -> str:
    lines = [("path", "label", *more), *rows]
    path.write_text("\n".join(",".join(map(str, row)) for row in lines))
    return str(path)


def data(place: Path, kind: str, classes: tuple[str, ...] = (), **options: Any) -> ImageFolderData:
    """A data module of a table; of these classes alone. The first class has fewer training images than the others."""
    rows = [
        (*row, split)
        for split, first in (("train", 8), ("test", 0))
        for row in rows_of(place, kind, split)[first:]
        if row[1] in classes or not classes
    ]
    table = write(place / f"{kind}{''.join(classes)}.csv", rows, "split")
    quick = {**QUICK, "batch_size": 12, "val_fraction": 0.25}
    return ImageFolderData(table=table, **{**quick, **options})


def classifier(images: ImageFolderData, **options: Any) -> Classifier:
    torch.manual_seed(0)
    small = {"backbone": "small_cnn", "weights": None, "scheduler": None}
    return Classifier(images.class_names, label_kind=images.label_kind, **{**small, **options})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


WEIGHTS = {0: 2, 3: 3, 5: 0, 8: 2, 13: 0}  # by the number of the row; the others have 1


def weighted(folder: Path, rows: list[tuple[str, str]]) -> str:
    listed = [(*row, WEIGHTS.get(i, 1)) for i, row in enumerate(rows)]
    return write(folder / "weighted.csv", listed, "weight")


def repeated(folder: Path, rows: list[tuple[str, str]]) -> str:
    """A table with as many copies of each image as its weight says."""
    listed = []
    for i, (path, label) in enumerate(rows):
        for copy in range(WEIGHTS.get(i, 1)):
            shutil.copy(path, folder / f"{i}_{copy}.png")
            listed.append((folder / f"{i}_{copy}.png", label))
    return write(folder / "repeated.csv", listed)


def trained(table: str) -> dict[str, Tensor]:
    """The state of a classifier after three steps on all images of a table, and its training loss."""
    images = ImageFolderData(table=table, **WHOLE)
    options = {"class_weights": "balanced", "label_smoothing": 0.1}
    model = classifier(images, backbone="lenet", optimizer=sgd, **options)
    trainer = fit(model, images, max_epochs=3, precision="64-true")
    loss = trainer.callback_metrics["train/loss_epoch"]
    return {**model.image_classifier.state_dict(), "loss": loss, "class_weight": model.class_weight}


@promise("image-weights")
@control("image-weights")
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_2_trains_as_the_image_twice(place, tmp_path, kind):
    rows = rows_of(place, kind)
    one = trained(weighted(tmp_path, rows))
    twice = trained(repeated(tmp_path, rows))
    # float64, but for the class weights and the logged loss, which are float32
    assert distance(one, twice) < 1e-6
    plain = trained(write(tmp_path / "plain.csv", rows))  # the control
    assert distance(one, plain) > 1e-3


@promise("image-weights")
def test_equal_weights_of_images_are_no_weights(place, tmp_path):
    rows = rows_of(place, "single")
    plain = ImageFolderData(table=write(tmp_path / "plain.csv", rows), **WHOLE)
    listed = [(*row, 0.3) for row in rows]
    equal = ImageFolderData(table=write(tmp_path / "equal.csv", listed, "weight"), **WHOLE)
    assert equal.splits["train"].weights is None and "no effect" in equal.scanned.remark
    assert equal.fingerprint == plain.fingerprint
    other = ImageFolderData(table=weighted(tmp_path, rows), **WHOLE)  # the control
    weights = other.splits["train"].weights
    assert weights.sum() == len(rows) + 2 and other.fingerprint != plain.fingerprint
    batch = next(iter(other.loader("train", train=True)))
    np.testing.assert_array_equal(batch["weight"], weights[batch["index"].numpy()])


def torch_loss(kind: str, class_weight: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    """torch's loss of targets (B, K) with a label smoothing of 0.1."""
    if kind == "single":
        summed = F.cross_entropy(logits, target, class_weight, label_smoothing=0.1, reduction="sum")
        return summed / (target @ class_weight).sum()
    return nn.BCEWithLogitsLoss(pos_weight=class_weight)(logits, target * 0.9 + 0.05)


@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.4, "cutmix": 1.0}], ids=["plain", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_takes_the_steps_of_a_plain_loop_with_torch_s_loss(place, kind, mixed):
    images = data(place, kind, **mixed)
    settings = {"class_weights": "balanced", "label_smoothing": 0.1, "optimizer": sgd}
    model = classifier(images, **settings)
    plain = classifier(images, **settings).double().train()
    start = {name: value.clone() for name, value in plain.network.state_dict().items()}
    fit(model, images, max_steps=5, precision="64-true")

    labels = images.splits["train"].targets.labels
    num_classes = len(images.class_names)
    one_hot = np.eye(num_classes)[labels] if kind == "single" else labels
    counts = torch.from_numpy(one_hot.sum(axis=0)).double()
    balanced = {
        "single": len(labels) / (num_classes * counts),
        "several": (len(labels) - counts) / counts,
    }
    optimizer = sgd(plain.network.parameters())
    for batch in [*data(place, kind, **mixed).loader("train", train=True)][:5]:
        np.testing.assert_array_equal(batch["label"], labels[batch["index"]])
        parts = [batch["label"], batch["partner_label"]] if mixed else [batch["label"]]
        if kind == "single":
            parts = [F.one_hot(part, num_classes) for part in parts]
        target = parts[0].double()
        if mixed:
            share = batch["share"].double()[:, None]
            assert (share >= 0.5).all()
            target = share * target + (1 - share) * parts[1].double()
        optimizer.zero_grad()
        torch_loss(kind, balanced[kind], plain(batch["image"]), target).backward()
        optimizer.step()
    for name, value in plain.network.state_dict().items():
        # class weights and shares are float32
        torch.testing.assert_close(model.network.state_dict()[name], value, rtol=1e-5, atol=1e-7)
    assert distance(plain.network.state_dict(), start) > 1e-3


def forget_the_weights_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "finetune.training.classifier.weights_of_classes"
    monkeypatch.setattr(name, lambda weights, class_names: [1.0] * len(class_names))


@promise("class-weights", controls=[forget_the_weights_of_the_text])
@pytest.mark.parametrize("kind", KINDS)
def test_class_weights_as_text_are_those_of_balanced_bit_for_bit(place, tmp_path, kind):
    uneven = write(tmp_path / "uneven.csv", rows_of(place, kind)[8:])

    def fitted(weights: str) -> Classifier:
        images = ImageFolderData(table=uneven, **WHOLE)
        model = classifier(images, class_weights=weights)
        fit(model, images, max_steps=2)
        return model

    balanced = fitted("balanced")
    pairs = zip(balanced.class_names, balanced.class_weight.tolist(), strict=True)
    by_text = fitted(",".join(f"{name}:{weight!r}" for name, weight in pairs))
    assert len({*balanced.class_weight.tolist()}) > 1
    assert distance(balanced.state_dict(), by_text.state_dict()) == 0
    assert distance(balanced.state_dict(), fitted("blue:2").state_dict()) > 0  # the control


class SaveInside(pl.Callback):
    """Saves a checkpoint after the third step, within an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


@promise("resume")
@pytest.mark.parametrize("kind", sweep(KINDS, quick=["several"]))
def test_a_fit_resumed_within_an_epoch_ends_as_an_uninterrupted_one(place, tmp_path, kind):
    options = {"mixup": 0.4, "cutmix": 1.0}

    def fitted(ckpt_path: Path | None = None, **limits: Any) -> Classifier:
        images = data(place, kind, **options)
        model = classifier(images, class_weights="balanced")
        fit(model, images, ckpt_path, **limits)
        return model

    path = tmp_path / "first.ckpt"
    full = fitted(max_epochs=2)
    first = fitted(callbacks=[SaveInside(path)])
    resumed = fitted(path, max_epochs=2)
    for name, value in full.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert full.calibration == resumed.calibration
    # the control: half of the fit is not all of it
    pairs = zip(first.network.parameters(), full.network.parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs)


AIMS = {"single": "recall:0.9:green", "several": "recall:0.9"}
# --threshold takes two classes, or several labels
CLASSES = {"single": ("blue", "green"), "several": ()}


@pytest.fixture(scope="module", params=["single", "several"])
def fitted(request: pytest.FixtureRequest, place: Path) -> tuple[str, Classifier, Path]:
    """The kind of the labels, a classifier of a short fit with an aim, and its checkpoint."""
    kind = request.param
    images = data(place, kind, CLASSES[kind], val_fraction=0.4)
    model = classifier(images, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    model.aim = model.task.parse_aim(AIMS[kind])
    path = place / f"{kind}.ckpt"
    fit(model, images, max_epochs=3).save_checkpoint(path)
    return kind, model, path


def test_a_checkpoint_predicts_by_the_calibration_of_its_own_validation_images(fitted, place):
    kind, model, path = fitted
    images = data(place, kind, CLASSES[kind], val_fraction=0.4)
    val = images.splits["val"]
    found = read_calibration(read_checkpoint(path))
    assert found == model.calibration and found.num_images == len(val)
    logits = model.eval()(torch.cat([batch["image"] for batch in images.loader("val")])).detach()
    labels = torch.from_numpy(val.targets.labels)
    expected = Calibration.fit(logits, labels, found.aim)
    if kind == "single":
        # Batch norm is fused into convolutions in a fit's validation: logits differ by rounding.
        assert found.temperature == pytest.approx(expected.temperature, rel=1e-4)
    else:
        assert found.scale == pytest.approx(expected.scale, rel=2e-2)
    samples = images.splits["test"]
    shown = [samples.read(i) for i in range(12)]
    p = probabilities(path, shown)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (output, *_) = trainer.predict(model, images.loader("test"))
    found_p = [[*one.probabilities.values()] for one in output]
    np.testing.assert_allclose(p, found_p, atol=1e-6)
    decided = model.calibration.decide(torch.from_numpy(p))
    has_label = decided if kind == "several" else torch.eye(p.shape[1])[decided]
    assert [one.labels for one in output] == [
        tuple(name for name, has in zip(images.class_names, row, strict=True) if has)
        for row in has_label
    ]
    tested = trainer.test(model, datamodule=images, verbose=False)[0]
    before = tested["test/calibration_error_before_scaling"]
    assert tested["test/calibration_error"] != before
    if kind == "single":  # decided by the threshold of green
        is_green = p[:, 1] >= found.thresholds[0]
        assert [one.label for one in output] == [images.class_names[int(each)] for each in is_green]
    else:
        assert {f"test/average_precision/{name}" for name in images.class_names} <= tested.keys()
        assert (decided.numpy() == (p >= np.array(found.thresholds))).all()


def test_weights_that_moved_since_the_validation_have_no_calibration(place, tmp_path):
    for kind in KINDS:
        images = data(place, kind)
        model = classifier(images)
        num_batches = images.num_batches
        trainer = fit(model, images, max_epochs=2, max_steps=num_batches + 1)
        trainer.save_checkpoint(tmp_path / "inside.ckpt")
        found = read_calibration(read_checkpoint(tmp_path / "inside.ckpt"))
        assert found == model.task.uncalibrated()


def command(place: Path, kind: str, *options: Any) -> list[Any]:
    data(place, kind, CLASSES[kind])  # writes the table
    table = place / f"{kind}{''.join(CLASSES[kind])}.csv"
    return ["fit", table, *QUICKEST, "--data.val_fraction", 0.4, *options]


@pytest.mark.parametrize(("kind", "aim"), [("single", "f1:green"), ("several", "accuracy")])
def test_threshold_is_chosen_reported_and_kept(place, cli, tmp_path, capsys, kind, aim):
    cli(*command(place, kind, "--threshold", aim, "--test_after_fit", "false"))
    out = capsys.readouterr().out
    run = tmp_path / "runs/fit/version_0"
    kept = read_calibration(read_checkpoint(run / "checkpoints/best.ckpt"))
    assert kept.aim is not None and kept.aim.measure == aim.partition(":")[0]
    assert all(line in out for line in kept.describe(CLASSES[kind] or LABELS))
    assert f"threshold: {aim}" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("fitted", ["several"], indirect=True)
def test_without_validation_there_is_no_calibration_and_that_is_reported(
    place, fitted, cli, tmp_path, capsys
):
    kind, _, checkpoint = fitted  # whose calibration is not inherited
    options = ["--data.val_fraction", 0, "--test_after_fit", "false"]
    cli(*command(place, kind, *options, "--model.weights", checkpoint))
    assert "nothing was validated" in capsys.readouterr().out
    for name in ("best", "last"):
        path = tmp_path / f"runs/fit/version_0/checkpoints/{name}.ckpt"
        assert read_calibration(read_checkpoint(path)).num_images == 0


def test_a_threshold_that_misses_its_aim_is_an_error_after_the_test(
    place, cli, tmp_path, monkeypatch
):
    monkeypatch.setattr("finetune.training.calibration.choose", lambda *_: Choice(None, 0.75))
    with pytest.raises(ValueError, match=r"precision 0\.99 .* 0\.75"):
        cli(*command(place, "single", "--threshold", "precision:0.99"))
    run = tmp_path / "runs/fit/version_0"
    assert (run / "test.json").exists()
    assert read_calibration(read_checkpoint(run / "checkpoints/best.ckpt")).aim
