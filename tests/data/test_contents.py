"""Digests of files: equal for copies, different for any changed byte, none for unreadable files."""

import os

import numpy as np
import pytest

from finetune.data.contents import PIECE, UNKNOWN, file_digests


def digest(path) -> int:
    return int(file_digests([str(path)], np.array([0]))[0])


@pytest.mark.parametrize("size", [1, PIECE, PIECE + 1, 3 * PIECE, 10 * PIECE])
def test_each_piece_and_the_size_count(tmp_path, size):
    content = bytes(size)
    (tmp_path / "own").write_bytes(content)
    (tmp_path / "copy").write_bytes(content)
    own = digest(tmp_path / "own")
    assert own == digest(tmp_path / "copy") != UNKNOWN
    for place in {0, size // 2, size - 1}:
        changed = bytearray(content)
        changed[place] = 1
        (tmp_path / "other").write_bytes(changed)
        assert digest(tmp_path / "other") != own
    (tmp_path / "other").write_bytes(content + b"\0")
    assert digest(tmp_path / "other") != own


def test_what_is_not_read_has_none(tmp_path):
    (tmp_path / "own").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / name) for name in ("own", "own", "gone", "pipe", "")]
    digests = file_digests(paths, np.array([0, 2, 3, 4]))
    assert digests.dtype == np.uint64 and np.flatnonzero(digests != UNKNOWN).tolist() == [0]
