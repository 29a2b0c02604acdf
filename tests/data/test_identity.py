"""What decides about pixels decides about their hash, and nothing else does."""

import os
from pathlib import Path

import numpy as np
import pytest

from finetune.data import identity as module
from finetune.data.identity import identity
from finetune.data.readers import FileReader, GreyReader, PathList


def files(folder: Path, *names: str) -> FileReader:
    for name in names:
        if not (folder / name).exists():
            (folder / name).write_bytes(name.encode())
    return FileReader(PathList(str(folder / name) for name in names))


def test_the_same_pictures_and_settings_have_the_same_hash(tmp_path):
    pixels = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    assert identity(GreyReader(pixels), "", 1) == identity(GreyReader(pixels.copy()), "", 1)
    read = files(tmp_path, "a.png", "b.png")
    assert identity(read, str(tmp_path), ("train", 0)) == identity(
        files(tmp_path, "a.png", "b.png"), str(tmp_path), ("train", 0)
    )


def test_each_thing_that_decides_changes_it(tmp_path, monkeypatch):
    root, read = str(tmp_path), files(tmp_path, "a.png", "b.png")
    found = [
        identity(read, root, "train"),
        identity(read, root, "val"),
        identity(files(tmp_path, "a.png"), root, "train"),
    ]
    (tmp_path / "a.png").write_bytes(b"another size")
    found.append(identity(read, root, "train"))
    os.utime(tmp_path / "b.png", (1, 1))
    found.append(identity(read, root, "train"))
    monkeypatch.setattr(module.cv2, "__version__", "0")
    found.append(identity(read, root, "train"))
    pixels = np.zeros((1, 2, 2), np.uint8)
    found += [identity(GreyReader(pixels), root, "train"), identity(GreyReader(pixels + 1), root, "train")]
    assert len(set(found)) == len(found)


def test_a_reader_that_does_not_say_what_it_reads_has_none():
    with pytest.raises(ValueError, match="function does not say which pictures it reads"):
        identity(lambda i: np.zeros((1, 1, 3), np.uint8), "", None)
