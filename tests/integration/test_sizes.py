"""`--data.eval_image_size` from fit to export."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from colours import QUICK
from small_fits import data, fit, scramble

from finetune import Classifier
from finetune.cli import main
from finetune.data.decode import decode
from finetune.data.transforms import eval_transform
from finetune.inference.predictor import Predictor

pytestmark = pytest.mark.slow

SIZES = ("--data.eval_image_size", "48", "--epochs", "3")


@pytest.fixture(scope="module")
def run(colours, tmp_path_factory):
    out = tmp_path_factory.mktemp("sizes")
    with pytest.raises(SystemExit) as caught:
        main(["fit", str(colours), *QUICK, *SIZES, "--out", str(out)])
    assert caught.value.code == 0
    return out / "fit/version_0"


def test_the_checkpoint_alone_prepares_images_at_the_size_of_evaluation(
    run, colours, cli, tmp_path
):
    best = run / "checkpoints/best.ckpt"
    predictor, image = Predictor(best), decode(next((colours / "test").rglob("*.png")))
    assert predictor.image_size == 48
    np.testing.assert_array_equal(
        predictor.prepare(image), eval_transform(48)(image=image)["image"]
    )

    cli("test", run, "--data.num_workers", "0", "--precision", "32-true")
    first, again = (
        json.loads(path.read_text())
        for path in (run / "test.json", next(tmp_path.rglob("test.json")))
    )
    assert again["test/loss"] == pytest.approx(first["test/loss"], abs=1e-6)


def test_predictions_are_those_of_images_at_the_size_of_evaluation(run, colours, cli, tmp_path):
    shutil.copy(run / "checkpoints/best.ckpt", tmp_path / "some.ckpt")
    scramble(tmp_path / "some.ckpt")
    cli(
        "predict",
        tmp_path / "some.ckpt",
        colours / "test",
        "--output",
        "out.csv",
        "--precision",
        "32-true",
    )
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    found = [float(row["p_blue"]) for row in rows]

    def expected(side: int) -> list[float]:
        known = torch.load(tmp_path / "some.ckpt", weights_only=True)
        known["datamodule_hyper_parameters"] |= {"image_size": side, "eval_image_size": None}
        torch.save(known, tmp_path / "plain.ckpt")
        return Predictor(tmp_path / "plain.ckpt")([decode(row["path"]) for row in rows])[
            :, 0
        ].tolist()

    # seven digits, batch norm folded
    np.testing.assert_allclose(found, expected(48), rtol=0, atol=2e-6)
    assert np.abs(np.subtract(found, expected(32))).max() > 1e-3  # control: the size of training


def test_an_exported_file_takes_the_size_of_evaluation(run, colours, cli, tmp_path):
    file = tmp_path / "some.safetensors"
    cli("export", run, "--format", "safetensors", "--out", file)
    about = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert about["input"]["images"][:4] == [
        "N",
        3,
        48,
        48,
    ] and "resize until the shorter side has 55" in str(about)
    assert Predictor(file).image_size == 48
    cli("test", file, colours, "--data.num_workers", "0")
    first, again = (
        json.loads(path.read_text())
        for path in (run / "test.json", next(tmp_path.rglob("test.json")))
    )
    assert again["test/loss"] == pytest.approx(first["test/loss"], abs=1e-5)


def test_evaluation_at_another_size_leaves_training_as_it_is(colours):
    def weights(**options) -> torch.Tensor:
        torch.manual_seed(0)
        images = data(colours, val_fraction=0.25, **options)
        model = Classifier(images.class_names, backbone="timm/test_efficientnet", weights=None)
        fit(model, images, max_epochs=2)
        return torch.cat([value.flatten() for value in model.network.parameters()])

    plain = weights()
    assert torch.equal(plain, weights(eval_image_size=48))
    assert not torch.equal(plain, weights(image_size=24))  # which trains on others
