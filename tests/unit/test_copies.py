"""Which files are equal, and which images are copies of one photograph: digests, perceptual hashes, near duplicates."""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from drawings import drawing, facts_of
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.fft import dctn

from finetune.data.checking.copies import connected, hashes, is_blank, near_duplicates, near_pairs
from finetune.data.checking.image_facts import Facts, collect_facts, inspect_images
from finetune.data.file_facts import PIECE, UNKNOWN, digest_of, equal_files, look_at

# Sizes about the pieces in which files are read; the last two differ from one another in a byte at a place in between.
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 10 * PIECE, 100_000, 2_500_000]


@given(
    files=st.lists(
        st.tuples(st.sampled_from(SIZES), st.sampled_from([None, 0.0, 0.5, 1.0])),
        min_size=2,
        max_size=9,
    )
)
def test_files_are_equal_if_each_byte_is(files):
    contents = []
    for size, place in files:
        content = bytearray(size)
        if size and place is not None:
            content[round(place * (size - 1))] = 1
        contents.append(bytes(content))
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{i}" for i in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            Path(path).write_bytes(content)
        digests = look_at(paths).digests
    sizes = np.array([len(content) for content in contents])
    assert digests.dtype == np.uint64 and ((digests == UNKNOWN) == (sizes == 0)).all()
    assert digests.tolist() == [*map(digest_of, contents)]
    found = equal_files(digests)
    table: dict[bytes, list[int]] = {}
    for i, content in enumerate(contents):
        table.setdefault(content, []).append(i)
    table.pop(b"", None)  # empty files are reported as such
    assert found == sorted(members for members in table.values() if len(members) > 1)
    for members in table.values():
        assert len({*digests[members].tolist()}) == 1
    assert len({int(digests[members[0]]) for members in table.values()}) == len(table)


def test_what_is_no_file_has_no_digest_and_no_equals(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / name) for name in ("gone", "pipe", "a", "b", "c")]
    for path in paths[2:]:
        Path(path).write_bytes(b"same")
    digests = look_at(paths).digests
    assert equal_files(digests) == [[2, 3, 4]]
    # only sets of several groups
    assert equal_files(digests, np.array([0, 0, 0, 1, 1])) == [[2, 3, 4]]
    assert equal_files(digests, np.array([0, 0, 1, 1, 1])) == []
    assert np.flatnonzero(digests != UNKNOWN).tolist() == [2, 3, 4]


# Perceptual hashes


def test_the_bits_of_a_hash_are_those_of_low_frequencies_above_their_median():
    grey = np.stack([np.asarray(drawing(seed).convert("L").resize((32, 32))) for seed in range(20)])
    for value, pixels in zip(hashes(grey)[0], grey, strict=True):
        low = dctn(pixels.astype(float), norm=None)[:8, :8].ravel()
        wanted = "".join("01"[bit] for bit in (low > np.median(low)).tolist())
        # those at the median may round to either side
        assert np.bitwise_count(value ^ np.uint64(int(wanted, 2))) <= 1


@given(seed=st.integers(0, 99), most_bits=st.integers(0, 12))
def test_the_search_of_similar_hashes_finds_each_pair_once(seed, most_bits):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**63, 400).astype(np.uint64)
    for i in range(200):  # near ones, at 0 to 12 bits
        flips = np.uint64(1) << rng.choice(64, i % 13, replace=False).astype(np.uint64)
        values[200 + i] = values[i] ^ np.bitwise_xor.reduce(flips, initial=np.uint64(0))
    distance = np.bitwise_count(values[:, None] ^ values[None])
    wanted = np.argwhere(np.triu(distance <= most_bits, 1))
    pairs = near_pairs(values, values, most_bits, 99)
    assert np.array_equal(pairs, wanted) and len(wanted) >= 15


# Near duplicates


def facts_of_images(folder: Path, images: list[np.ndarray]) -> Facts:
    paths = [str(folder / f"{i}.png") for i in range(len(images))]
    for path, pixels in zip(paths, images, strict=True):
        Image.fromarray(np.asarray(pixels).round().astype(np.uint8)).save(path)
    return collect_facts(inspect_images(paths), len(paths))


CHANGES = {
    "smaller": lambda image: image.resize((130, 95)),
    "squashed": lambda image: image.resize((256, 256)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop((15, 3, 300, 212)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found_and_other_images_are_not(tmp_path, change):
    paths = []
    for seed in range(12):
        paths += [str(tmp_path / f"{seed}.jpg"), str(tmp_path / f"{seed}_copy.jpg")]
        drawing(seed).save(paths[-2], quality=92)
        CHANGES[change](drawing(seed)).save(paths[-1], quality=60)
    facts = collect_facts(inspect_images(paths), len(paths))
    pairs = near_duplicates(facts, np.arange(len(paths)))
    assert [pair[:2] for pair in pairs] == [(i, i + 1) for i in range(0, len(paths), 2)]
    assert all(pair.is_mirrored == (change == "mirrored") for pair in pairs)
    assert all((pair.share < 0.99) == (change == "cropped") for pair in pairs)


def test_blank_images_are_recognised_by_what_they_show(tmp_path):
    """Red and its grey have the luminance 76; blue of 100 has 11, which is darker than "nearly black"."""
    noise = np.random.default_rng(0).integers(0, 9, (60, 80, 3))
    red_on_grey = np.full((60, 80, 3), 76)
    red_on_grey[20:40, 30:50] = (254, 0, 0)
    blue = np.zeros((60, 80, 3))
    blue[20:40, 30:50, 2] = 100
    shown = [np.asarray(drawing(0)), red_on_grey, blue]
    blank = [np.full((60, 80, 3), 120), noise, np.full((60, 80, 3), (254, 0, 0)), blue / 20]
    facts = facts_of_images(tmp_path, [*shown, *blank])
    assert is_blank(facts).tolist() == [False] * 3 + [True] * 4
    # the controls: in grey one is flat, and one is nearly black
    assert facts.grey[1].std() < 1 and np.percentile(facts.grey[2], 99) < 12


def test_one_shape_in_other_colours_is_another_image(tmp_path):
    """A shirt in red and in green, equal in grey, and one as a grey copy, which is the same photograph."""
    grey = np.asarray(drawing(0).convert("L")).astype(float)
    red = grey[..., None] * (0.7, 0.4, 0.4)
    luminance = red @ (0.299, 0.587, 0.114)
    green = grey[..., None] * (0.3, 0.6, 0.3)
    green *= (luminance / (green @ (0.299, 0.587, 0.114)))[..., None]
    facts = facts_of_images(tmp_path, [red, green, np.repeat(luminance[..., None], 3, axis=2)])
    assert np.abs(facts.grey[0].astype(int) - facts.grey[1]).max() <= 1  # the control
    assert [pair[:2] for pair in near_duplicates(facts, np.arange(3))] == [(0, 2), (1, 2)]


def test_many_copies_make_one_set_and_few_pairs():
    """Each against each would be 300 squared."""
    noise = np.random.default_rng(0).normal(0, 1, (300, 48, 48))
    one = np.asarray(drawing(0).convert("L").resize((48, 48), 4))
    facts = facts_of(np.clip(one + noise, 0, 255).astype(np.uint8))
    pairs = near_duplicates(facts, np.arange(300))
    assert connected([pair[:2] for pair in pairs], 300) == [list(range(300))]
    assert len(pairs) <= 4 * 2 * 300
    assert connected([(1, 4), (4, 7), (2, 3)], 9) == [[1, 4, 7], [2, 3]]


def test_gradients_are_alike_by_their_hashes_and_are_no_copies():
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:48, :48] / 47
    steep, way = rng.uniform(50, 200, (2000, 1, 1)), rng.uniform(0.9, 1, (2000, 1, 1))
    grey = (20 + steep * (x + way * y) / 2).astype(np.uint8)
    began = time.process_time()
    assert near_duplicates(facts_of(grey), np.arange(2000)) == []
    assert time.process_time() - began < 5  # to lay each pair over the other would take an hour
