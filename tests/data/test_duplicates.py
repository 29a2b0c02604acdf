"""Copies of one photograph: hashes, the search for near ones, and what decides."""

import numpy as np
import pytest
from PIL import Image

from finetune.data.checking import perceptual_hash
from finetune.data.checking.duplicates import connected, is_blank, near_duplicates
from finetune.data.checking.perceptual_hash import hashes, near_pairs
from finetune.data.checking.picture_facts import gathered, look_at


def drawing(seed: int, width: int = 300, height: int = 220) -> Image.Image:
    """A picture with large and small things in it."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3)).astype(np.uint8)).resize((width, height), 3)
    fine = Image.fromarray(rng.integers(0, 256, (height // 7, width // 7, 3)).astype(np.uint8)).resize(
        (width, height), 3
    )
    return Image.blend(coarse, fine, 0.4)


CHANGES = {
    "encoded": lambda p: p,
    "smaller": lambda p: p.resize((130, 95)),
    "squashed": lambda p: p.resize((256, 256)),
    "mirrored": lambda p: p.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda p: p.crop((15, 3, 300, 212)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found_and_others_are_not(tmp_path, change):
    paths = []
    for seed in range(12):
        paths += [str(tmp_path / f"{seed}.jpg"), str(tmp_path / f"{seed}_copy.jpg")]
        drawing(seed).save(paths[-2], quality=92)
        CHANGES[change](drawing(seed)).save(paths[-1], quality=60)
    facts = gathered(look_at(paths), len(paths))
    pairs = near_duplicates(facts, np.arange(len(paths)))
    assert [pair[:2] for pair in pairs] == [(i, i + 1) for i in range(0, len(paths), 2)]
    assert all(pair.is_mirrored == (change == "mirrored") for pair in pairs)
    assert all((pair.share < 0.99) == (change == "cropped") for pair in pairs)


def test_the_hash_of_a_mirror_image_is_that_of_the_mirrored_picture():
    grey = np.random.default_rng(0).integers(0, 256, (50, 48, 48)).astype(np.uint8)
    plain, mirrored = hashes(grey)
    again, back = hashes(grey[:, :, ::-1])
    # Frequencies at the median itself may fall on either side by rounding.
    assert np.bitwise_count(again ^ mirrored).max() <= 2 and np.bitwise_count(back ^ plain).max() <= 2
    assert np.bitwise_count(plain ^ mirrored).min() > 10  # control: mirroring changes it


def test_the_search_finds_each_pair_once_and_bands_do_too(monkeypatch):
    rng = np.random.default_rng(0)
    left = rng.integers(0, 2**63, 5000).astype(np.uint64)
    for i in range(200):  # near ones, at 0 to 9 bits
        flips = rng.choice(64, i % 10, replace=False).astype(np.uint64)
        left[4000 + i] = left[i] ^ np.bitwise_xor.reduce(np.uint64(1) << flips, initial=np.uint64(0))
    distance = np.bitwise_count(left[:, None] ^ left[None])
    for radius, most in ((9, 10_000), (7, 10), (9, 10)):
        monkeypatch.setattr(perceptual_hash, "MAX_EXACT", most)
        wanted = np.argwhere(np.triu(distance <= (radius if most > 10 else 7), 1))
        i, j = near_pairs(left, left, radius, 99)
        assert np.array_equal(np.column_stack([i, j]), wanted) and len(wanted) >= 160


def test_blank_pictures_are_told_by_what_they_show(tmp_path):
    rng = np.random.default_rng(0)
    pictures = [np.full((60, 80, 3), 120), rng.integers(0, 9, (60, 80, 3)), np.asarray(drawing(0))]
    for i, pixels in enumerate(pictures):
        Image.fromarray(np.asarray(pixels, np.uint8)).save(tmp_path / f"{i}.png")
    facts = gathered(look_at([str(tmp_path / f"{i}.png") for i in range(4)]), 4)  # the last is not there
    assert is_blank(facts).tolist() == [True, True, False, False]
    assert facts.is_readable.tolist() == [True, True, True, False]


def test_sets_are_what_edges_join():
    assert connected([(1, 4), (4, 7), (2, 3)], 9) == [[1, 4, 7], [2, 3]]
    assert connected([], 5) == []
