"""Folders of images that tests of several modules read."""

import gzip
import hashlib
from pathlib import Path

import pytest
from data_files import clothes, idx
from torchvision.datasets import FashionMNIST as Source

from finetune.data import heif, walk


@pytest.fixture(scope="module")
def few(colours, tmp_path_factory) -> Path:
    """Eight images of each class, two of them damaged."""
    root = tmp_path_factory.mktemp("few")
    for name in ("blue", "red"):
        (root / "train" / name).mkdir(parents=True)
        for path in sorted((colours / "train" / name).iterdir())[:8]:
            (root / "train" / name / path.name).write_bytes(path.read_bytes())
        (root / "train" / name / "03.png").write_bytes(b"\x89PNG")
    return root


@pytest.fixture
def some(tmp_path, colours, monkeypatch) -> Path:
    """The working folder, with four images, a list of three and one that is missing, and a file that is no image."""
    images = [path.read_bytes() for path in sorted((colours / "test/red").iterdir())]
    for name, content in zip(("b/2.png", "a/ö.PNG", "a/1.png", "top.png"), images, strict=False):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes.md").write_text("no image")
    (tmp_path / "list.txt").write_text(
        "b/2.png\n\nnowhere.png\r\na/ö.PNG\nb/2.png\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
