"""Weights of images in a table: in a fit, a weight of 2 equals the image twice."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colours import QUICKEST, draw_colours
from labelled_files import draw_labelled
from promise import control, promise
from small_fits import fit

from finetune import Classifier, ImageFolderData
from finetune.cli import run
from finetune.features import linear_probe
from finetune.runs import run_lock
from finetune.training.overview import data_warnings

WEIGHTS = {0: 2, 3: 3, 5: 0, 8: 2, 13: 0}  # by the number of the row; the others have 1

# The same images in each step, in a network without batch norm. What is left are the weights.
WHOLE = {
    "batch_size": 100,
    "image_size": 28,
    "num_workers": 0,
    "augmentations": None,
    "crop_and_flip": False,
    "val_fraction": 0,
    "test_fraction": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("weights")
    draw_colours(place / "single", train=7)
    draw_labelled(place / "several", train=21)
    return place


def rows_of(place: Path, kind: str) -> list[tuple[str, str]]:
    """The path and the labels of each image."""
    if kind == "several":
        paths = sorted((place / kind / "train").iterdir())
        return [(str(path), ";".join(path.stem.split("+")[1:])) for path in paths]
    paths = sorted((place / kind / "train").rglob("*.png"))
    return [(str(path), path.parent.name) for path in paths]


def write(path: Path, rows: list[tuple]) -> str:
    header = ("path", "label", "weight")[: len(rows[0])]
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]))
    return str(path)


def weighted(folder: Path, rows: list[tuple[str, str]]) -> str:
    listed = [(*row, WEIGHTS.get(i, 1)) for i, row in enumerate(rows)]
    return write(folder / "weighted.csv", listed)


def repeated(folder: Path, rows: list[tuple[str, str]]) -> str:
    """A table with as many copies of each image as its weight says."""
    listed = []
    for i, (path, label) in enumerate(rows):
        copies = [folder / f"{i}_{copy}.png" for copy in range(WEIGHTS.get(i, 1))]
        for copy in copies:
            shutil.copy(path, copy)
            listed.append((copy, label))
    return write(folder / "repeated.csv", listed)


def trained(table: str, **options: Any) -> dict[str, torch.Tensor]:
    """The state of a classifier after three steps on all images of a table, and its training loss."""
    data = ImageFolderData(table=table, **WHOLE)
    torch.manual_seed(0)
    model = Classifier(
        data.class_names,
        "lenet",
        weights=None,
        label_kind=data.label_kind,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        scheduler=None,
        **options,
    )
    trainer = fit(model, data, max_epochs=3, precision="64-true")
    loss = trainer.callback_metrics["train/loss_epoch"]
    return {**model.image_classifier.state_dict(), "loss": loss, "class_weight": model.class_weight}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


@promise("image-weights")
@control("image-weights")
@pytest.mark.parametrize("kind", ["single", "several"])
def test_a_weight_of_2_trains_as_the_image_twice(place, tmp_path, kind):
    rows = rows_of(place, kind)
    options = {"class_weights": "balanced", "label_smoothing": 0.1}
    one = trained(weighted(tmp_path, rows), **options)
    twice = trained(repeated(tmp_path, rows), **options)
    # float64, but for the class weights and the logged loss, which are float32
    assert distance(one, twice) < 1e-6
    plain = trained(write(tmp_path / "plain.csv", rows), **options)  # the control
    assert distance(one, plain) > 1e-3


@promise("image-weights")
def test_equal_weights_are_no_weights(place, tmp_path):
    rows = rows_of(place, "single")
    plain = ImageFolderData(table=write(tmp_path / "plain.csv", rows), **WHOLE)
    equal = write(tmp_path / "equal.csv", [(*row, 0.3) for row in rows])
    data = ImageFolderData(table=equal, **WHOLE)
    assert data.splits["train"].weights is None
    assert data.fingerprint == plain.fingerprint
    assert "'weight'; the weights are equal in training and have no effect" in data.scanned.remark
    other = ImageFolderData(table=weighted(tmp_path, rows), **WHOLE)  # the control
    assert other.splits["train"].weights.sum() == 23 and other.fingerprint != plain.fingerprint
    batch = next(iter(other.loader("train", train=True)))
    np.testing.assert_array_equal(
        batch["weight"], other.splits["train"].weights[batch["index"].numpy()]
    )


def test_the_solved_head_has_the_weights_of_its_images(place, tmp_path, monkeypatch):
    calls = []
    fit_probe = linear_probe.fit_probe

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options["image_weights"]))
        return fit_probe(*arguments, **options)

    monkeypatch.setattr(linear_probe, "fit_probe", spy)
    rows = rows_of(place, "single")
    torn = tmp_path / "torn.png"
    torn.write_bytes(b"torn")
    rows[2] = (str(torn), rows[2][1])
    table = weighted(tmp_path, rows)
    data = ImageFolderData(table=table, **WHOLE, on_bad_image="skip")
    model = Classifier(data.class_names, "lenet", weights=None, freeze="backbone")
    trainer = fit(model, data, precision="64-true")
    (((x, y, _), weights),) = calls
    expected = [WEIGHTS.get(i, 1) for i in range(len(rows)) if i != 2]
    kept = [i for i, path in enumerate(data.splits["train"].paths) if path != str(torn)]
    assert len(y) == len(x) == len(rows) - 1
    assert weights.tolist() == data.splits["train"].weights[kept].tolist()
    assert sorted(weights) == sorted(expected)
    # the training loss is weighted, too
    weight, bias = (p.detach() for p in model.network[-1].parameters())
    losses = torch.nn.functional.cross_entropy(
        torch.from_numpy(x) @ weight.T + bias, torch.from_numpy(y), reduction="none"
    )
    mean = float((losses * torch.from_numpy(weights)).sum() / weights.sum())
    assert float(trainer.callback_metrics["train/loss_epoch"]) == pytest.approx(mean, abs=1e-6)
    assert abs(mean - float(losses.mean())) > 1e-4  # the control


def test_a_class_of_weight_0_is_reported(place, tmp_path):
    rows = [(*row, int(row[1] != "green")) for row in rows_of(place, "single")]
    data = ImageFolderData(table=write(tmp_path / "x.csv", rows), **WHOLE)
    assert "all training images of green have the weight 0: these classes are not trained" in (
        list(data_warnings(data))
    )
    other = ImageFolderData(table=weighted(tmp_path, rows_of(place, "single")), **WHOLE)
    assert not any("weight" in line for line in data_warnings(other))


@pytest.mark.slow
def test_a_weighted_run_is_resumed_exactly_and_not_with_other_weights(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    draw_colours(tmp_path / "single", train=12)
    rows = rows_of(tmp_path, "single")
    weighted(tmp_path, rows)

    def command(name: str, table: str, epochs: int, *options: str) -> None:
        quick = [*QUICKEST, "--test_after_fit", "false", "--data.mixup", "0.4"]
        run(["fit", table, *quick, "--trainer.max_epochs", str(epochs), *options, name])
        run_lock.release()

    def weights(name: str) -> dict[str, torch.Tensor]:
        last = tmp_path / "runs/fit" / name / "checkpoints/last.ckpt"
        return torch.load(last, weights_only=True)["state_dict"]

    caplog.set_level("INFO")
    command("whole", "weighted.csv", 2, "--name")
    assert "image weights: 0 to 3, in training only; 2 images of weight 0" in caplog.text
    command("parts", "weighted.csv", 1, "--name")
    command("runs/fit/parts", "weighted.csv", 2, "--resume")
    assert all(value.equal(weights("parts")[name]) for name, value in weights("whole").items())
    Path("weighted.csv").write_text(Path("weighted.csv").read_text().replace(",3", ",4"))
    with pytest.raises(ValueError, match="on other images"):
        command("runs/fit/parts", "weighted.csv", 3, "--resume")
