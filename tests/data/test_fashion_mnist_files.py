"""Fashion-MNIST's files as arrays, wherever they are, packed or not."""

import gzip
import threading
from pathlib import Path

import numpy as np
import pytest
from data_files import clothes, write_unpacked
from torchvision.datasets import FashionMNIST as Source

from finetune.data.datasets.fashion_mnist_files import CLASS_NAMES, is_available, obtain, read


def check(root: Path) -> None:
    arrays = clothes(60, 20)
    for split, name in ("train", "train"), ("test", "t10k"):
        pixels, labels = read(root, split)
        assert pixels.dtype == np.uint8 and labels.dtype == np.int64
        np.testing.assert_array_equal(pixels, arrays[f"{name}-images-idx3-ubyte"])
        np.testing.assert_array_equal(labels, arrays[f"{name}-labels-idx1-ubyte"])


@pytest.mark.parametrize("folder", ["FashionMNIST/raw", ".", "some/where"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_files_are_found_beneath_root(tmp_path, packed, folder, is_packed):
    place = tmp_path / "data" / folder
    place.mkdir(parents=True)
    for name, content in packed.items():
        (place / (name if is_packed else name[:-3])).write_bytes(
            content if is_packed else gzip.decompress(content)
        )
    assert is_available(tmp_path / "data") and not is_available(tmp_path / "other")
    before = {path: path.read_bytes() for path in place.iterdir()}
    for _ in range(2):  # the second time there is nothing to do
        obtain(tmp_path / "data")
        check(tmp_path / "data")
    assert {path: path.read_bytes() for path in before} == before
    assert not list(tmp_path.rglob("*.lock"))


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("num_bytes", [0, 3, 12, 25])
def test_half_an_unpacked_file_is_unpacked_anew(tmp_path, packed, name, num_bytes):
    write_unpacked(tmp_path, 60, 20)
    raw = tmp_path / "FashionMNIST/raw"
    for packed_name, content in packed.items():
        (raw / packed_name).write_bytes(content)
    (raw / name).write_bytes((raw / name).read_bytes()[:num_bytes])
    obtain(tmp_path)
    check(tmp_path)


def test_half_a_file_without_its_packed_one_is_reported(tmp_path, packed):
    write_unpacked(tmp_path, 60, 20)
    (tmp_path / "FashionMNIST/raw/t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01")
    with pytest.raises(
        OSError, match=r"Fashion-MNIST is not available.*put its four .gz files in .*raw"
    ):
        obtain(tmp_path)


@pytest.mark.parametrize("lacks", ["all", "one", "its content"])
def test_files_that_are_nowhere(tmp_path, packed, lacks):
    name = "t10k-labels-idx1-ubyte.gz"
    for other in packed.keys() - {name} if lacks != "all" else ():
        (tmp_path / other).write_bytes(packed[other])
    if lacks == "its content":
        (tmp_path / name).write_bytes(b"another file")  # its sum is wrong
    assert not is_available(tmp_path)
    with pytest.raises(
        OSError,
        match=r"Fashion-MNIST is not available(.|\n)*put its four .gz files in .*FashionMNIST/raw",
    ):
        obtain(tmp_path)
    assert not list(tmp_path.rglob("*.lock"))


def test_of_several_at_once_one_unpacks(tmp_path, packed, monkeypatch):
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
    unpacked, download = [], Source.download
    monkeypatch.setattr(Source, "download", lambda self: (unpacked.append(1), download(self)))
    threads = [threading.Thread(target=obtain, args=[tmp_path]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unpacked == [1]
    check(tmp_path)


def test_class_names_are_torchvisions_without_slash():
    assert list(CLASS_NAMES) == [name.replace("/", " or ") for name in Source.classes]


@pytest.mark.parametrize("holds", [None, "empty", "something"])
def test_a_set_that_cannot_be_had_leaves_nothing_behind(tmp_path, monkeypatch, holds):
    monkeypatch.setattr(Source, "mirrors", ["file:///nowhere/"])
    root = tmp_path / "clothes/new"
    if holds:
        root.mkdir(parents=True)
    if holds == "something":
        (root / "other.txt").write_text("not ours")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="put its four .gz files in") as caught:
        obtain(root)
    assert "\n" not in str(caught.value) and sorted(tmp_path.rglob("*")) == before
