"""The table of the images of a split: its rows, their names, and how an image is read."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from finetune.data import samples as samples_module
from finetune.data.decode import DecodeError, decode
from finetune.data.memmap import MemmapImages, write_memmap
from finetune.data.samples import CachedImages, PathList, Samples
from finetune.data.splits import group_ids
from finetune.data.targets import ClassIndex

LATIN1 = os.fsdecode(b"caf\xe9.png")  # no UTF-8: Python holds the byte as a surrogate
NAMES = [
    "a.png",
    "",
    "ordner/größe.jpg",
    "写真/ホットドッグ.png",
    "🌭.png",
    LATIN1,
    "with space\nand line.png",
]


def test_path_list_gives_back_its_paths():
    paths = PathList(iter(NAMES))
    assert len(paths) == len(NAMES) and list(paths) == NAMES
    assert paths[2:5] == NAMES[2:5] and paths[::-1] == NAMES[::-1] and paths[10:] == []
    assert LATIN1 in paths and paths.index("🌭.png") == 4
    assert list(pickle.loads(pickle.dumps(paths))) == NAMES  # for spawned workers
    for wrong in (len(NAMES), -1):
        with pytest.raises(IndexError):
            paths[wrong]
    assert list(PathList([])) == []


@pytest.mark.parametrize("block", [1, 3, 4096])
def test_path_list_yields_in_blocks_what_it_has_by_index(monkeypatch, block):
    monkeypatch.setattr(samples_module, "_BLOCK", block)
    paths = PathList([*NAMES, "b.png", "c/d.png", "", *NAMES])
    assert list(paths) == [paths[i] for i in range(len(paths))] != [*NAMES, *NAMES]
    assert list(zip(paths, paths, strict=True))[3] == (paths[3], paths[3])


def test_path_list_needs_eight_bytes_a_path_more_than_its_letters():
    paths = [f"train/hotdog/{i:06d}.jpg" for i in range(10_000)]
    arrays = [value for value in vars(PathList(paths)).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == sum(map(len, paths)) + 8 * (len(paths) + 1)
    # No Python object per path, whose reference count would copy the page in every forked worker.
    assert all(array.dtype.kind in "iu" for array in arrays) and len(vars(PathList(paths))) == len(
        arrays
    )


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    """Four images of three classes, each of one grey of its own, reduced to 20 pixels."""
    for i in range(4):
        folder = tmp_path / "train" / f"class {i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{i}.png"), np.full((40, 60, 3), 10 * i, np.uint8))
    paths = sorted(map(str, tmp_path.rglob("*.png")))
    labels = np.array([int(Path(path).parent.name[-1]) for path in paths])
    return Samples(PathList(paths), ClassIndex(labels, 3), "drawn", str(tmp_path / "train"), "", 20)


def cached(samples: Samples, path: Path, lacks: int | None = None) -> Samples:
    """The same images from a cache in another order, which holds one grey level more than the files."""
    num = len(samples)
    images = [None if i == lacks else samples.read(i) + 1 for i in reversed(range(num))]
    write_memmap(path, iter(images), {}, 1e9)
    return replace(samples, cached=CachedImages(MemmapImages(path), np.arange(num)[::-1]))


def test_rows_that_are_taken_keep_all_that_belongs_to_them(samples, tmp_path):
    rows = np.array([3, 0, 2])
    groups = group_ids(["patient 1", "patient 2", "patient 1", "patient 3"])
    table = replace(cached(samples, tmp_path / "cache"), groups=groups)
    taken = table.take(rows)
    assert taken.groups.tolist() == [groups[3], groups[0], groups[2]]
    assert samples.take(rows).groups is None
    assert len(taken) == len(taken.targets) == len(taken.cached.rows) == 3
    for i, row in enumerate(rows.tolist()):
        assert taken.paths[i] == table.paths[row] and taken.targets[i] == table.targets[row]
        np.testing.assert_array_equal(taken.read(i), table.read(row))
    assert (taken.hashes() == table.hashes()[rows]).all()
    assert (taken.origin, taken.folder, taken.shorter_side) == ("drawn", samples.folder, 20)
    # the control: rows in another order are other images
    assert list(table.take(np.sort(rows)).paths) != list(taken.paths)


def test_names_do_not_depend_on_the_place_of_the_folder(samples):
    assert next(iter(samples.names())) == "class 0/0.png"
    moved = replace(
        samples,
        paths=[path.replace(samples.folder, "/elsewhere") for path in samples.paths],
        folder="/elsewhere",
    )
    assert (moved.hashes() == samples.hashes()).all()
    tagged = replace(samples, tag="val/")
    assert next(iter(tagged.names())) == "val/class 0/0.png"
    assert not np.isin(tagged.hashes(), samples.hashes()).any()


def test_images_are_read_from_files_or_a_cache(samples, tmp_path):
    np.testing.assert_array_equal(samples.read(1), decode(samples.paths[1], shorter_side=20))
    assert samples.read(1).shape == (20, 30, 3)
    table = cached(samples, tmp_path / "cache", lacks=2)
    np.testing.assert_array_equal(table.read(1), samples.read(1) + 1)
    # not in the cache: read again
    np.testing.assert_array_equal(table.read(2), samples.read(2))
    Path(samples.paths[2]).write_bytes(b"broken")
    with pytest.raises(DecodeError, match="2.png|class"):
        table.read(2)
