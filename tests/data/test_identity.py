"""What decides about pixels decides about their hash, and nothing else does."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
from data_files import small

from finetune.data import identity as module
from finetune.data.identity import code_of, identity
from finetune.data.readers import FileReader, GreyReader, PathList
from finetune.data.transforms import build_transform, train_transform


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


def dims(folder: Path, divisor: int) -> list[dict[str, Any]]:
    """A transform of the user's own, in a module imported anew, as a config names it."""
    lines = ["import albumentations as A", "class Dim(A.ImageOnlyTransform):", "    def apply(self, img, **params):"]
    (folder / "own_transforms.py").write_text("\n".join([*lines, f"        return img // {divisor}\n"]))
    sys.modules.pop("own_transforms", None)
    importlib.invalidate_caches()
    return [{"class_path": "own_transforms.Dim"}]


def test_another_code_of_a_transform_of_one_s_own_changes_it(colours, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def of(divisor: int, split: str) -> str:
        return small(colours, num_views=1, augmentations=dims(tmp_path, divisor)).identity(split)

    assert of(2, "train") == of(2, "train") != of(16, "train")
    assert of(2, "val") == of(16, "val")  # which it is not for


def test_the_code_of_nested_transforms_counts_and_that_of_a_version_does_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    dim = build_transform(*dims(tmp_path, 2))
    assert code_of(A.Compose([A.OneOf([dim, A.HorizontalFlip()])])) == code_of(A.Compose([dim])) != []
    assert code_of(train_transform(24, [{"class_path": "TrivialAugment"}, {"class_path": "ColorJitter"}])) == []


def test_a_transform_without_a_source_is_told():
    class Typed(A.ImageOnlyTransform):
        __module__ = "__nowhere__"  # as in a notebook

    with pytest.raises(ValueError, match="the transforms of __nowhere__ have no source to tell a change by"):
        code_of(A.Compose([Typed()]))
