"""Fashion-MNIST from its files to a batch, its labels and its validation split."""

import numpy as np
import pytest
import torch
from data_files import clothes, real_data

from finetune.data.datasets.fashion_mnist import FashionMNIST
from finetune.data.splits import stratified
from finetune.system.messages import WrongUsage


def test_fashion_mnist_from_its_packed_files(packed, tmp_path):
    root, arrays = tmp_path, clothes(60, 20)
    for name, content in packed.items():
        (root / name).write_bytes(content)
    data = FashionMNIST(str(root), val_fraction=0.25, image_size=32, num_workers=0)
    assert (
        data.class_names[:3] == ["T-shirt or top", "Trouser", "Pullover"]
        and len(data.class_names) == 10
    )
    labels = arrays["train-labels-idx1-ubyte"]
    # numbered within each class
    names = [f"{label}/{(labels[:i] == label).sum()}" for i, label in enumerate(labels)]
    rest, val = stratified(names, labels, (0.25,), 0)
    # 1.5 of each 6 pictures
    assert len(rest) + len(val) == 60 and set(np.bincount(labels[val])) <= {1, 2}
    images = {
        "train": arrays["train-images-idx3-ubyte"][rest],
        "val": arrays["train-images-idx3-ubyte"][val],
    }
    images["test"] = arrays["t10k-images-idx3-ubyte"]
    for split, expected in images.items():
        part = data.splits[split]
        assert len(part.labels) == len(part.paths) == len(expected)
        for i, picture in enumerate(expected):
            np.testing.assert_array_equal(part.read(i), np.stack([picture] * 3, axis=-1))
    assert data.splits["val"].labels.tolist() == labels[val].tolist()
    assert (
        list(data.splits["val"].paths) == [f"train/{i}" for i in val]
        and data.splits["test"].paths[3] == "test/3"
    )
    (batch,) = data.test_dataloader()
    assert batch["image"].shape == (20, 3, 32, 32) and torch.equal(
        batch["image"][:, 0], batch["image"][:, 2]
    )
    assert (
        data.fingerprint
        != FashionMNIST(str(root), val_fraction=0.25, split_seed=1).fingerprint
        != ""
    )


def test_class_folders_to_leave_out_are_refused(tmp_path):
    with pytest.raises(
        WrongUsage, match="--data.exclude leaves out class folders, and Fashion-MNIST has none"
    ):
        FashionMNIST(str(tmp_path), exclude="Bag")
    assert not list(tmp_path.iterdir())  # nothing was fetched


@pytest.mark.slow
@pytest.mark.real
def test_the_real_fashion_mnist(tmp_path):
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for packed in (real_data("fashion-mnist") / "FashionMNIST/raw").glob("*.gz"):
        (raw / packed.name).symlink_to(packed)
    data = FashionMNIST(str(tmp_path), val_fraction=0.1, image_size=28)
    counts = {split: np.bincount(part.labels) for split, part in data.splits.items()}
    assert np.abs(counts["val"] - 600).max() <= 6  # one for each power of four
    assert (counts["train"] + counts["val"]).tolist() == [6000] * 10 and counts[
        "test"
    ].tolist() == [1000] * 10
    # The published mean of the 60,000 training pictures, over the two parts.
    pixels = np.concatenate([data.splits[split].read.pixels for split in ("train", "val")])
    assert pixels.mean() / 255 == pytest.approx(0.2860, abs=5e-5)
