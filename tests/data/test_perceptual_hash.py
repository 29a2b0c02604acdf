"""Perceptual hashes, and the search for similar ones, compared with all pairs."""

import numpy as np
import pytest
from drawings import drawing
from scipy.fft import dctn

from finetune.data.checking.perceptual_hash import hashes, near_pairs, nearest


def test_the_bits_are_those_of_low_frequencies_above_their_median():
    grey = np.stack([np.asarray(drawing(seed).convert("L").resize((32, 32))) for seed in range(20)])
    for value, pixels in zip(hashes(grey)[0], grey, strict=True):
        low = dctn(pixels.astype(float), norm=None)[:8, :8].ravel()
        wanted = "".join("01"[bit] for bit in (low > np.median(low)).tolist())
        # those at the median may round to either side
        assert np.bitwise_count(value ^ np.uint64(int(wanted, 2))) <= 1


def test_the_hash_of_a_mirror_image_is_that_of_the_mirrored_image():
    grey = np.random.default_rng(0).integers(0, 256, (50, 48, 48)).astype(np.uint8)
    plain, mirrored = hashes(grey)
    again, back = hashes(grey[:, :, ::-1])
    # Frequencies at the median itself may fall on either side by rounding.
    assert (
        np.bitwise_count(again ^ mirrored).max() <= 2 and np.bitwise_count(back ^ plain).max() <= 2
    )
    assert np.bitwise_count(plain ^ mirrored).min() > 10  # control: mirroring changes it


def test_the_search_finds_each_pair_once():
    rng = np.random.default_rng(0)
    left = rng.integers(0, 2**63, 1000).astype(np.uint64)
    for i in range(200):  # near ones, at 0 to 9 bits
        flips = rng.choice(64, i % 10, replace=False).astype(np.uint64)
        left[800 + i] = left[i] ^ np.bitwise_xor.reduce(np.uint64(1) << flips, initial=np.uint64(0))
    distance = np.bitwise_count(left[:, None] ^ left[None])
    wanted = np.argwhere(np.triu(distance <= 9, 1))
    i, j = near_pairs(left, left, 9, 99)
    assert np.array_equal(np.column_stack([i, j]), wanted) and len(wanted) >= 200


def test_of_many_the_nearest_are_kept_and_every_image_stays_joined():
    rng = np.random.default_rng(0)
    left = rng.integers(0, 4, 300).astype(np.uint64)  # all within 2 bits of each other
    distance = np.bitwise_count(left[:, None] ^ left[None])
    i, j = near_pairs(left, left, 16, 5)
    for row in range(300):
        later = np.sort(distance[row, row + 1 :])
        assert sorted(distance[row, j[i == row]]) == later[:5].tolist()


@pytest.mark.parametrize("first", [0, 10**6])  # short keys, and long ones
def test_nearest_keeps_the_first_of_equals(first):
    i = first + np.array([7, 3, 3, 7, 3, 10**5])
    assert nearest(i, np.array([1, 5, 2, 1, 2, 60]), 1).tolist() == [0, 2, 5]
    assert nearest(i, np.array([1, 5, 2, 1, 2, 60]), 9).tolist() == [0, 1, 2, 3, 4, 5]


def test_no_images_have_no_hashes_and_no_pairs():
    nothing = hashes(np.zeros((0, 48, 48), np.uint8))[0]
    assert len(nothing) == 0 and [len(side) for side in near_pairs(nothing, nothing, 16, 8)] == [
        0,
        0,
    ]
