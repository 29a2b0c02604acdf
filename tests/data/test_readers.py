"""Lists of very many paths."""

import os
import pickle

import numpy as np
import pytest

from finetune.data.readers import PathList

LATIN1 = os.fsdecode(b"caf\xe9.png")  # no UTF-8: Python holds the byte as a surrogate
NAMES = ["a.png", "", "ordner/größe.jpg", "写真/ホットドッグ.png", "🌭.png", LATIN1, "with space\nand line.png"]


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


def test_path_list_needs_eight_bytes_a_path_more_than_its_letters():
    paths = [f"train/hotdog/{i:06d}.jpg" for i in range(10_000)]
    arrays = [value for value in vars(PathList(paths)).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == sum(map(len, paths)) + 8 * (len(paths) + 1)
    # No Python object per path, whose reference count would copy the page in every forked worker.
    assert all(array.dtype.kind in "iu" for array in arrays) and len(vars(PathList(paths))) == len(arrays)
