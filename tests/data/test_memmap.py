"""Images written to a memory map are read back equal; every kind of damage is noticed."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from finetune.data import memmap as module
from finetune.data.memmap import MemmapImages, TooLarge, write_memmap
from finetune.system.cache_dir import HEADER_BYTES
from finetune.system.files import unfinished

SIZES = [(3, 5), (1, 1), None, (40, 7), (8, 8)]


def images() -> Iterator[np.ndarray | None]:
    rng = np.random.default_rng(0)
    for size in SIZES:
        yield None if size is None else rng.integers(0, 256, (*size, 3)).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.pictures"
    write_memmap(path, images(), {"root": "größe"}, max_bytes=10**6)
    return path


def check(packed: MemmapImages) -> None:
    assert len(packed) == len(SIZES) and packed.about == {"root": "größe"}
    for i, image in enumerate(images()):
        found = packed[i]
        assert (found is None) == (image is None)
        if found is not None:
            np.testing.assert_array_equal(found, image)
            assert found.dtype == np.uint8 and found.flags.c_contiguous


def test_what_went_in_comes_out(path):
    check(MemmapImages(path))
    check(pickle.loads(pickle.dumps(MemmapImages(path))))  # as a spawned worker gets it
    assert os.listdir(path.parent) == [path.name]


def test_images_that_are_no_contiguous_memory(tmp_path):
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)[::-1, ::2]
    write_memmap(tmp_path / "x", [image], {}, max_bytes=100)
    np.testing.assert_array_equal(MemmapImages(tmp_path / "x")[0], image)


def test_no_images_at_all(tmp_path):
    write_memmap(tmp_path / "x", [], {"a": 1}, max_bytes=0)
    assert len(MemmapImages(tmp_path / "x")) == 0 and MemmapImages(tmp_path / "x").about == {"a": 1}


def test_the_file_can_not_be_written_through_an_image(path):
    with pytest.raises(ValueError, match="read-only"):
        MemmapImages(path)[0][:] = 0
    check(MemmapImages(path))


def test_a_file_that_is_removed_serves_whoever_has_it_open(path):
    packed = MemmapImages(path)
    path.unlink()
    check(packed)


def test_the_index_needs_sixteen_bytes_an_image(tmp_path):
    write_memmap(tmp_path / "x", [None] * 10_000, {}, max_bytes=0)
    assert (tmp_path / "x").stat().st_size < 16 * 10_000 + 200


def test_a_file_that_was_cut_off_or_holds_too_much_is_damaged(path):
    content = path.read_bytes()
    cut = [content[:num_bytes] for num_bytes in (0, 1, 63, 64, 65, 200, -1, -64, -65, -150)]
    # the trailer's checksum holds for neither of the last
    for damaged in (*cut, content[64:], bytes(64) + content):
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            MemmapImages(path)
    path.write_bytes(content)
    check(MemmapImages(path))


def test_every_bit_behind_the_pixels_counts(path):
    content = path.read_bytes()
    start = HEADER_BYTES + 3 * sum(size[0] * size[1] for size in SIZES if size)
    start += -start % 64
    for position in range(start, len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            MemmapImages(path)


def test_control_a_bit_of_a_pixel_is_not_noticed(path):
    # Said in the docstring: all pixels would have to be read for it.
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 2] ^= 1
    path.write_bytes(content)
    assert MemmapImages(path)[0][0, 0, 2] ^ 1 == next(images())[0, 0, 2]


def test_above_the_limit_nothing_is_left(tmp_path):
    num_bytes = 3 * sum(size[0] * size[1] for size in SIZES if size)
    with pytest.raises(TooLarge, match="0.0 GB"):
        write_memmap(tmp_path / "x", images(), {}, max_bytes=num_bytes - 1)
    assert os.listdir(tmp_path) == []
    write_memmap(tmp_path / "x", images(), {}, max_bytes=num_bytes)
    assert os.listdir(tmp_path) == ["x"]


def test_an_error_leaves_what_was_there(path):
    def failing() -> Iterator[np.ndarray]:
        yield np.zeros((50, 50, 3), np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_memmap(path, failing(), {}, max_bytes=10**6)
    check(MemmapImages(path))
    assert os.listdir(path.parent) == [path.name]


def test_what_a_killed_process_left_goes_when_the_file_is_written_again(path):
    left = path.with_name(f".{path.name}.12345678.tmp")
    other = path.with_name(".other.pictures.12345678.tmp")
    for file in (left, other):
        file.write_bytes(b"half")
    assert unfinished(path) == [left]
    write_memmap(path, images(), {"root": "größe"}, max_bytes=10**6)
    assert sorted(os.listdir(path.parent)) == sorted([path.name, other.name])


def test_a_disk_that_fails_while_others_are_written_fails_the_file(tmp_path, monkeypatch):
    # Linux reports an error of the disk to one fsync only: the first, here, runs next to the writing.
    errors = [OSError(5, "Input/output error")]
    monkeypatch.setattr(module, "_SYNC_BYTES", 10)
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (_ for _ in ()).throw(errors.pop()) if errors else None
    )
    with pytest.raises(OSError, match="Input/output"):
        write_memmap(tmp_path / "x", images(), {}, max_bytes=10**6)
    assert os.listdir(tmp_path) == []
