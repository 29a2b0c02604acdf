"""`none` and the column `familiar`: images of none of the classes, in `predict`, `test`, `serve` and Python.

The share of images: test_familiarity.py.
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colours import QUICKEST, draw_colours
from PIL import Image
from processes import finetune
from promise import control, promise
from services import LIMITS, client_of
from torch.nn.modules.module import register_module_forward_hook

from finetune import load
from finetune.inference.predictor import Predictor
from finetune.models.image_classifier import ImageClassifier
from finetune.serving.service import Service

CPU = ("--trainer.accelerator", "cpu", "--workers", "0")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A data set with a folder of validation images, and `strange`, of white images."""
    folder = tmp_path_factory.mktemp("images")
    draw_colours(folder / "set", train=12, val=8, test=8)
    (folder / "strange").mkdir()
    for i in range(5):
        white = np.full((48, 56, 3), 255 - 9 * i, np.uint8)
        Image.fromarray(white).save(folder / f"strange/{i}.png")
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def independent(model: Any, images: Path, wanted: str) -> np.ndarray:
    """The familiarity of images by the definition."""

    def directions(glob: str) -> np.ndarray:
        x = model.embed([str(path) for path in sorted(images.glob(glob))]).astype(np.float64)
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    means = np.array([directions(f"set/train/{name}/*").mean(0) for name in model.class_names])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    known = (directions("set/val/*/*") @ means.T).max(1)
    # a tie is one in float32
    new = (directions(wanted) @ means.T).max(1) + 1e-7
    return (1 + (known <= new[:, None]).sum(1)) / (1 + len(known))


@promise("familiarity")
@control("familiarity")
@pytest.mark.parametrize("freeze", ["null", "backbone"])
def test_predict_serve_and_python_know_which_images_are_unfamiliar(images, cli, tmp_path, freeze):
    fit = ("fit", images / "set", *QUICKEST, "--trainer.max_epochs", 4, "--report", "true")
    cli(*fit, "--freeze", freeze)
    run = tmp_path / "runs/fit/version_0"
    cli("predict", run, images / "set/test", images / "strange", *CPU, "--none_below", "0.05")
    written = rows(tmp_path / "runs/predict/version_0/predictions.csv")
    found = [float(row["familiar"]) for row in written]
    model = load(run, "cpu")
    expected = [
        *independent(model, images, "set/test/*/*"),
        *independent(model, images, "strange/*"),
    ]
    assert found == pytest.approx(expected, abs=1e-6)
    assert {row["class"] for row in written[24:]} == {"none"}
    assert {row["class"] for row in written[:24]} >= set(model.class_names)
    assert [row["class"] == "none" for row in written] == [value < 0.05 for value in found]
    # the control: without --none_below they are predicted as classes
    paths = [row["path"] for row in written]
    assert "none" not in {one.label for one in model.predict(paths)}
    predictions = model.predict(paths, none_below=0.05)
    assert [one.familiar for one in predictions] == pytest.approx(found, abs=1e-6)
    assert [one.label for one in predictions] == [row["class"] for row in written]
    with client_of(Service(Predictor(run / "checkpoints/best.ckpt"), LIMITS, 4)) as client:
        for path, value in list(zip(paths, found, strict=True))[::7]:
            (one,) = client.post("/predict", content=Path(path).read_bytes()).json()["predictions"]
            assert one["familiar"] == pytest.approx(value, abs=1e-6)
    tested = [float(row["familiar"]) for row in rows(run / "test_predictions.csv")]
    assert tested == pytest.approx(found[:24], abs=1e-6)
    unfamiliar = json.loads((run / "test.json").read_text())["unfamiliar"]
    assert unfamiliar == pytest.approx(np.mean(np.array(found[:24]) < 0.05))
    assert "unlike the training images" in (run / "report.html").read_text()


@promise("familiarity")
@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["null", "backbone"])
def test_two_processes_find_the_same_images_unfamiliar(images, tmp_path, freeze):
    found = []
    for num in (1, 2):
        cwd = tmp_path / str(num)
        cwd.mkdir()
        fit = ("fit", images / "set", *QUICKEST, "--trainer.max_epochs", 2, "--freeze", freeze)
        assert finetune(*fit, "--devices", num, cwd=cwd).returncode == 0
        test = ("predict", "runs/fit/version_0", images / "set/test", *CPU, "--devices", num)
        assert finetune(*test, cwd=cwd).returncode == 0
        tested = json.loads((cwd / "runs/fit/version_0/test.json").read_text())
        written = rows(cwd / "runs/predict/version_0/predictions.csv")
        found.append([tested["unfamiliar"], *(float(row["familiar"]) for row in written)])
    # the weights differ by rounding, which may move an image by one place of 24
    assert found[0] == pytest.approx(found[1], abs=0.041)


def test_a_solved_head_computes_the_features_of_training_images_once(images, cli):
    num = 0

    def count(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal num
        num += len(inputs[0]) if isinstance(module, ImageClassifier) else 0

    with register_module_forward_hook(count):
        cli("fit", images / "set", *QUICKEST, "--freeze", "backbone", "--test_after_fit", "false")
    assert num == 36 + 2 * 24  # those of an epoch, and of the familiarity


def test_resume_of_a_run_that_ended_before_its_familiarity(images, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("finetune.features.familiarity.MOST_IMAGES", 9)  # 10 of 12 of each class
    fit = ("fit", images / "set", *QUICKEST, "--resume")
    cli(*fit)
    run = tmp_path / "runs/fit/version_0"
    path = run / "checkpoints/best.ckpt"
    content = torch.load(path, weights_only=True)
    expected = content["finetune"].pop("familiarity")
    torch.save(content, path)
    (run / "test.json").unlink()
    cli(*fit)
    found = torch.load(path, weights_only=True)["finetune"]["familiarity"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mistake", ["shape", "nan", "key", "empty"])
def test_a_damaged_familiarity_is_refused(fitted_runs, tmp_path, mistake):
    path = tmp_path / "best.ckpt"
    content = torch.load(fitted_runs.single / "checkpoints/best.ckpt", weights_only=True)
    plain = content["finetune"]["familiarity"]
    assert plain["means"].dtype == torch.float32
    if mistake == "shape":
        plain["means"] = plain["means"][:, :-1].clone()
    elif mistake == "nan":
        plain["cosines"][0] = torch.nan
    elif mistake == "key":
        plain["more"] = plain["means"]
    else:
        plain["cosines"] = plain["cosines"][:0].clone()
    torch.save(content, path)
    with pytest.raises(ValueError, match="familiarity|class means"):
        load(path)


def test_models_that_do_not_know_leave_the_familiarity_out(fitted_runs, colours):
    image = str(colours / "test/red/00.png")
    for file in (fitted_runs.ensemble, fitted_runs.exported / "best.safetensors"):
        model = load(file, "cpu")
        assert model.predict(image)[0].familiar is None
        with pytest.raises(ValueError, match="none_below"):
            model.predict(image, none_below=0.1)
