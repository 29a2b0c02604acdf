"""Files with equal contents, compared with a table of complete contents."""

import os

import numpy as np
import pytest

from finetune.data.checking.exact_duplicates import equal_files


@pytest.mark.parametrize("seed", range(3))
def test_sets_are_those_of_a_table_of_complete_contents(tmp_path, seed):
    """Contents differ in length, or only in the first byte, the middle or the last one; some are 5 MB long."""
    rng = np.random.default_rng(seed)
    contents = []
    for i in range(60):
        body = bytearray(
            np.random.default_rng(i % 4).bytes(
                (10, 5000, 5000, 5_000_000 if i < 12 else 70_000)[i % 4]
            )
        )
        if rng.random() < 0.5:
            body[rng.choice([0, len(body) // 2, len(body) - 1])] ^= 1
        contents.append(bytes(body))
        (tmp_path / str(i)).write_bytes(body)
    table: dict[bytes, list[int]] = {}
    for i, content in enumerate(contents):
        table.setdefault(content, []).append(i)
    sizes = np.array([len(content) for content in contents])
    wanted = sorted(members for members in table.values() if len(members) > 1)
    assert (
        equal_files([str(tmp_path / str(i)) for i in range(60)], sizes) == wanted
        and len(wanted) > 4
    )


def test_what_has_vanished_or_is_a_pipe_has_no_equals_and_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / name) for name in ("gone", "pipe", "a", "b")]
    for path in paths[2:]:
        with open(path, "wb") as file:
            file.write(b"same")
    assert equal_files(paths, np.full(4, 4)) == [[2, 3]]


def test_equal_files_are_equal_to_the_last_byte(tmp_path):
    body = np.random.default_rng(0).bytes(50_000)
    contents = [body, body[:-1] + b"\0", body, b"\0" + body[1:], body[:-1], b"", b""]
    paths = [str(tmp_path / str(i)) for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        with open(path, "wb") as file:
            file.write(content)
    sizes = np.array([len(content) for content in contents])
    assert equal_files(paths, sizes) == [[0, 2]]
    assert equal_files(paths, sizes, np.array([0, 0, 0, 1, 1, 1, 1])) == []
    assert equal_files(paths, sizes, np.array([0, 0, 1, 1, 1, 1, 1])) == [[0, 2]]
