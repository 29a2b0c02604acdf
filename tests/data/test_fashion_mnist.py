"""Fashion-MNIST from its files to a batch, its labels and its validation split."""

import gzip
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import clothes, real_data

from finetune.data.datasets.fashion_mnist import CLASS_NAMES, FashionMNIST, write_images


def write_packed(root: Path, packed: dict[str, bytes]) -> None:
    raw = root / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for name, content in packed.items():
        (raw / name).write_bytes(content)


def test_fashion_mnist_from_its_packed_files(packed, tmp_path):
    root, arrays = tmp_path, clothes(60, 20)
    write_packed(root, packed)
    data = FashionMNIST(str(root), val_fraction=0.25, image_size=32, num_workers=0)
    assert data.class_names == list(CLASS_NAMES)
    folder = root / "FashionMNIST/images"
    expected: dict[str, np.ndarray] = {}
    labels_of: dict[str, int] = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        counters = [count() for _ in CLASS_NAMES]
        labels = arrays[f"{name}-labels-idx1-ubyte"].tolist()
        for label, image in zip(labels, arrays[f"{name}-images-idx3-ubyte"], strict=True):
            path = f"{folder}/{split}/{CLASS_NAMES[label]}/{next(counters[label]):04d}.png"
            expected[path] = image
            labels_of[path] = label
    seen: list[str] = []
    for part in data.splits.values():
        for i, path in enumerate(part.paths):
            np.testing.assert_array_equal(
                part.read(i), np.stack([expected[path].astype(np.uint8)] * 3, axis=-1)
            )
            assert part.targets[i] == labels_of[path]
            seen.append(path)
    assert sorted(seen) == sorted(expected)
    # numbered within each class, so each is split evenly: about 1.5 of each 6 images
    assert set(data.splits["val"].targets.counts()) <= {1, 2, 3}
    assert len(data.splits["test"]) == 20
    (batch,) = data.test_dataloader()
    assert batch["image"].shape == (20, 3, 32, 32) and torch.equal(
        batch["image"][:, 0], batch["image"][:, 2]
    )
    other = FashionMNIST(str(root), val_fraction=0.25, split_seed=1)
    assert data.fingerprint != other.fingerprint != ""


def test_images_are_written_once_and_need_no_other_file(packed, tmp_path, monkeypatch):
    write_packed(tmp_path, packed)
    before = FashionMNIST(str(tmp_path))
    before.read()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    assert len(times) == 80
    for path in [*tmp_path.rglob("*-ubyte"), *tmp_path.rglob("*.gz")]:
        path.unlink()
    monkeypatch.setattr("finetune.data.datasets.fashion_mnist.read", None)
    assert FashionMNIST.is_in(str(tmp_path))
    again = FashionMNIST(str(tmp_path))
    assert again.fingerprint == before.fingerprint
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")} == times


@pytest.mark.parametrize("num_written", [0, 1, 70])
def test_images_are_all_there_or_none(packed, tmp_path, monkeypatch, num_written):
    write_packed(tmp_path, packed)
    written: list[Path] = []
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if len(written) == num_written:
            raise OSError(28, "No space left on device")
        written.append(path)
        return write_bytes(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            write_images(tmp_path)
    assert not list(tmp_path.rglob("*.png")) and not list(tmp_path.rglob(".images*"))
    # the control: with enough space
    assert len(list(write_images(tmp_path).rglob("*.png"))) == 80


def test_without_its_files_a_line_says_where_to_put_them(packed, tmp_path):
    write_packed(tmp_path, dict(list(packed.items())[1:]))
    with pytest.raises(OSError, match=r"put its four \.gz files in .*FashionMNIST/raw"):
        FashionMNIST(str(tmp_path)).read()


def unpacked(path: Path) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)


@pytest.mark.slow
@pytest.mark.real
def test_the_real_fashion_mnist(tmp_path):
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for packed in (real_data("fashion-mnist") / "FashionMNIST/raw").glob("*.gz"):
        (raw / packed.name).symlink_to(packed)
    data = FashionMNIST(str(tmp_path), val_fraction=0.1, image_size=28)
    counts = {split: part.targets.counts() for split, part in data.splits.items()}
    assert np.abs(counts["val"] - 600).max() <= 6  # one for each power of four
    assert (counts["train"] + counts["val"]).tolist() == [6000] * 10 and counts[
        "test"
    ].tolist() == [1000] * 10
    # The published mean of the 60,000 training images; each hundredth image is one of them, with its label.
    images = unpacked(raw / "train-images-idx3-ubyte.gz")[16:]
    labels = unpacked(raw / "train-labels-idx1-ubyte.gz")[8:]
    pixels = images.reshape(60_000, 28 * 28)
    assert pixels.mean() / 255 == pytest.approx(0.2860, abs=5e-5)
    known = {(row.tobytes(), int(label)) for row, label in zip(pixels, labels, strict=True)}
    for part in (data.splits["train"], data.splits["val"]):
        for i in range(0, len(part.paths), 100):
            assert (part.read(i)[..., 0].tobytes(), int(part.targets[i])) in known
