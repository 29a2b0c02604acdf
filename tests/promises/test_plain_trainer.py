"""Our network and our data module with Lightning's unchanged Trainer."""

import csv
import re

import pytest
import pytorch_lightning as pl
import torch
from data_files import write_unpacked
from paths import ROOT

from finetune import Classifier, FashionMNIST, Hotdog, ImageFolderData, SampleData, load

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*override existing callbacks"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0"),  # which logger Lightning takes
]


PAGE = (ROOT / "docs/python.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ImageFolderData, SampleData, Hotdog, FashionMNIST])
def test_a_plain_trainer_fits_and_tests_them(kind, colours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write_unpacked(tmp_path / "fashion") if kind is FashionMNIST else colours
    images = kind(str(root), image_size=28, batch_size=12, num_workers=0)
    torch.manual_seed(0)
    network = Classifier(
        images.class_names, backbone="small_cnn", weights=None, head_lr_multiplier=1.0
    )
    before = {
        name: value.clone()
        for name, value in network.state_dict().items()
        if name.startswith("network.")
    }
    trainer = pl.Trainer(max_epochs=8, accelerator="cpu", enable_model_summary=False)
    trainer.fit(network, images)
    after = network.state_dict()
    assert not any(
        torch.equal(after[name], value) for name, value in before.items() if name.endswith("weight")
    )
    assert (
        trainer.global_step == 8 * images.num_batches and "val/accuracy" in trainer.callback_metrics
    )
    (result,) = trainer.test(network, images, verbose=False)
    num = len(images.splits["test"])
    matrix = network.counts["confusion_matrix"]
    assert sum(map(sum, matrix)) == num  # each image counts once
    right = sum(row[i] for i, row in enumerate(matrix))
    assert result["test/accuracy"] == pytest.approx(right / num)
    assert result["test/accuracy"] > 1.5 / len(images.class_names)  # it has learned


def test_what_a_plain_trainer_has_saved_is_a_checkpoint_like_any(colours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = ImageFolderData(str(colours), image_size=28, batch_size=12, num_workers=0)
    network = Classifier(images.class_names, backbone="small_cnn", weights=None)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False)
    trainer.fit(network, datamodule=images)
    path = trainer.checkpoint_callback.best_model_path
    trainer.test(network, images, ckpt_path=path, verbose=False)
    model = load(path)
    assert model.class_names == images.class_names and len(model.predict(colours / "test")) == 30
    again = Classifier.load_from_checkpoint(path)
    assert all(
        torch.equal(value, network.state_dict()[name]) for name, value in again.state_dict().items()
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's calls of jsonargparse
def test_a_lightning_cli_of_a_users_own_predicts_as_the_command(
    colours, tmp_path, monkeypatch, cli
):
    """By the script of docs/python.md."""
    (text,) = re.findall(r"```python\n(from pytorch_lightning.cli.*?)if __name__", PAGE, re.S)
    script: dict = {}
    exec(text, script)
    words = f"fit --seed_everything 0 --data.root {colours} --data.image_size 28 --data.num_workers 0".split()
    words += [
        "--model.backbone",
        "small_cnn",
        "--model.weights",
        "null",
        "--trainer.max_epochs",
        "1",
    ]
    words += ["--trainer.accelerator=cpu", "--trainer.callbacks", "LearningRateMonitor"]
    run = script["Script"](Classifier, ImageFolderData, args=[*words, "--trainer.logger=true"])
    assert any(isinstance(one, pl.callbacks.LearningRateMonitor) for one in run.trainer.callbacks)
    path = run.trainer.checkpoint_callback.best_model_path
    images = ImageFolderData(
        str(colours), image_size=28, num_workers=0, predict=str(colours / "test")
    )
    batches = run.trainer.predict(run.model, images, ckpt_path=path)
    own = [[*one.probabilities.values()] for batch in batches for one in batch]
    cpu = ("--trainer.accelerator", "cpu", "--workers", 0, "--precision", "32-true")
    cli("predict", path, colours / "test", *cpu, "--out", "found.csv")
    with open("found.csv", encoding="utf-8") as file:
        found = [
            [float(row[f"p_{name}"]) for name in run.model.class_names]
            for row in csv.DictReader(file)
        ]
    assert len(found) == 30
    assert found == [pytest.approx(row, abs=1e-6) for row in own]
