"""Folders of images that tests of several modules read."""

import gzip
import hashlib

import pytest
from data_files import clothes, idx
from torchvision.datasets import FashionMNIST as Source

from finetune.data import heif, walk


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package that reads HEIC, whether one is installed or not."""
    monkeypatch.setattr(heif, "has_heic_reader", lambda: False)
    monkeypatch.setattr(walk, "IMAGE_SUFFIXES", walk.IMAGE_SUFFIXES - set(heif.HEIC_SUFFIXES))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Fashion-MNIST's files by name; torchvision takes them for the originals, and finds no server."""
    files = {f"{name}.gz": gzip.compress(idx(array)) for name, array in clothes(60, 20).items()}
    monkeypatch.setattr(
        Source, "resources", [(name, hashlib.md5(files[name]).hexdigest()) for name in files]
    )
    monkeypatch.setattr(Source, "mirrors", ["file:///nowhere/"])
    return files
