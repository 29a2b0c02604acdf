"""Our network and our data module with Lightning's unchanged Trainer."""

import pytest
import pytorch_lightning as pl
import torch
from data_files import write_unpacked

from finetune import Classifier, FashionMNIST, Hotdog, ImageFolderData, SampleData, load

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*override existing callbacks"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0"),  # which logger Lightning takes
]


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
