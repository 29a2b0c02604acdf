"""Images in one memory-mapped file are read back equal; damage of any byte but a pixel is noticed."""

import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.memmap import MemmapImages, TooLarge, write_memmap
from finetune.system.cache_dir import HEADER_BYTES
from finetune.system.files import unfinished

SIZES = [(3, 5), (1, 1), None, (40, 7), (8, 8)]
NUM_BYTES = 3 * sum(size[0] * size[1] for size in SIZES if size)


def images(sizes=SIZES) -> list[np.ndarray | None]:
    rng = np.random.default_rng(0)
    found = [size and rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    return [image if image is None else image[::-1] for image in found]  # no contiguous memory


def check(packed: MemmapImages, expected: list[np.ndarray | None]) -> None:
    assert len(packed) == len(expected) and packed.about == {"root": "größe"}
    for i, image in enumerate(expected):
        found = packed[i]
        assert (found is None) == (image is None)
        if image is not None:
            np.testing.assert_array_equal(found, image)
            assert found.flags.c_contiguous and not found.flags.writeable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_memmap(tmp_path / "some.images", images(), {"root": "größe"}, max_bytes=10**6)
    return tmp_path / "some.images"


@given(sizes=st.lists(st.none() | st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=6))
def test_images_that_were_written_are_read_back(sizes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        write_memmap(path, images(sizes), {"root": "größe"}, max_bytes=10**6)
        packed = MemmapImages(path)
        check(packed, images(sizes))
        check(pickle.loads(pickle.dumps(packed)), images(sizes))  # as a spawned worker gets it
        assert os.listdir(folder) == ["x"]
        path.unlink()  # it serves whoever has it open
        check(packed, images(sizes))


def test_the_index_needs_eight_bytes_an_image(tmp_path):
    write_memmap(tmp_path / "x", [None] * 10_000, {}, max_bytes=0)
    assert (tmp_path / "x").stat().st_size < 8 * 10_000 + 200


def test_each_cut_and_each_bit_behind_the_pixels_is_damage(path):
    content = path.read_bytes()
    start = HEADER_BYTES + NUM_BYTES
    damaged = [content[:num_bytes] for num_bytes in (0, 1, 63, 64, 65, 200, -1, -64, -65, -150)]
    # the trailer's checksum holds for neither of these
    damaged += [content[64:], bytes(64) + content]
    for place in range(start, len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        damaged.append(bytes(changed))
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(ValueError):
            MemmapImages(path)
    # The control: a pixel is not noticed, for which all would have to be read.
    changed = bytearray(content)
    changed[HEADER_BYTES + 2] ^= 1
    path.write_bytes(changed)
    assert MemmapImages(path)[0][0, 0, 2] ^ 1 == images()[0][0, 0, 2]


def test_above_the_limit_nothing_is_left(tmp_path):
    with pytest.raises(TooLarge):
        write_memmap(tmp_path / "x", images(), {}, max_bytes=NUM_BYTES - 1)
    assert os.listdir(tmp_path) == []
    write_memmap(tmp_path / "x", images(), {}, max_bytes=NUM_BYTES)


def test_an_error_leaves_what_was_there_and_what_a_kill_left_goes(path):
    def failing():
        yield np.zeros((50, 50, 3), np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_memmap(path, failing(), {}, max_bytes=10**6)
    check(MemmapImages(path), images())
    assert os.listdir(path.parent) == [path.name]
    left = path.with_name(f".{path.name}.12345678.tmp")
    other = path.with_name(".other.images.12345678.tmp")
    for file in (left, other):
        file.write_bytes(b"half")
    assert unfinished(path) == [left]
    write_memmap(path, images(), {"root": "größe"}, max_bytes=10**6)
    assert sorted(os.listdir(path.parent)) == sorted([path.name, other.name])
