"""Which images are copies of one photograph, and the cost of many similar images."""

import time

import numpy as np
import pytest
from drawings import drawing, facts_of
from PIL import Image

from finetune.data.checking.duplicates import (
    best_fit,
    connected,
    is_blank,
    near_duplicates,
)
from finetune.data.checking.image_facts import collect_facts, inspect_images

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
    facts = collect_facts(inspect_images(paths), len(paths))
    pairs = near_duplicates(facts, np.arange(len(paths)))
    assert [pair[:2] for pair in pairs] == [(i, i + 1) for i in range(0, len(paths), 2)]
    assert all(pair.is_mirrored == (change == "mirrored") for pair in pairs)
    assert all((pair.share < 0.99) == (change == "cropped") for pair in pairs)


def test_blank_images_are_recognised_by_what_they_show(tmp_path):
    rng = np.random.default_rng(0)
    images = [np.full((60, 80, 3), 120), rng.integers(0, 9, (60, 80, 3)), np.asarray(drawing(0))]
    for i, pixels in enumerate(images):
        Image.fromarray(np.asarray(pixels, np.uint8)).save(tmp_path / f"{i}.png")
    # the last is not there
    facts = collect_facts(inspect_images([str(tmp_path / f"{i}.png") for i in range(4)]), 4)
    assert is_blank(facts).tolist() == [True, True, False, False]
    assert facts.is_readable.tolist() == [True, True, True, False]


def test_colours_of_one_luminance_are_no_blank_image(tmp_path):
    """Red and its grey have the luminance 76; blue of 100 has 11, which is darker than "nearly black"."""
    red_on_grey = np.full((60, 80, 3), 76)
    red_on_grey[20:40, 30:50] = (254, 0, 0)
    blue = np.zeros((60, 80, 3))
    blue[20:40, 30:50, 2] = 100
    for i, pixels in enumerate((red_on_grey, blue, np.full((60, 80, 3), (254, 0, 0)), blue / 20)):
        Image.fromarray(np.asarray(pixels, np.uint8)).save(tmp_path / f"{i}.png")
    facts = collect_facts(inspect_images([str(tmp_path / f"{i}.png") for i in range(4)]), 4)
    assert facts.grey[0].std() < 1, "the control: in grey it is flat"
    assert np.percentile(facts.grey[1], 99) < 12, "the control: in grey it is nearly black"
    assert is_blank(facts).tolist() == [False, False, True, True]


def test_one_shape_in_other_colours_is_another_image(tmp_path):
    """A shirt in red and in green, equal in grey, and one as a grey copy, which is the same photograph."""
    grey = np.asarray(drawing(0).convert("L")).astype(float)
    red = grey[..., None] * (0.7, 0.4, 0.4)
    luminance = red @ (0.299, 0.587, 0.114)
    green = grey[..., None] * (0.3, 0.6, 0.3)
    green *= (luminance / (green @ (0.299, 0.587, 0.114)))[..., None]
    paths = [str(tmp_path / f"{i}.png") for i in range(3)]
    for path, pixels in zip(
        paths, (red, green, np.repeat(luminance[..., None], 3, axis=2)), strict=True
    ):
        Image.fromarray(pixels.round().astype(np.uint8)).save(path)
    facts = collect_facts(inspect_images(paths), 3)
    assert np.abs(facts.grey[0].astype(int) - facts.grey[1]).max() <= 1, (
        "the control: in grey they are equal"
    )
    assert [pair[:2] for pair in near_duplicates(facts, np.arange(3))] == [(0, 2), (1, 2)]


def test_sets_are_what_edges_join():
    assert connected([(1, 4), (4, 7), (2, 3)], 9) == [[1, 4, 7], [2, 3]]
    assert connected([], 5) == []


def test_the_fit_is_the_same_either_way_round():
    full, part = (
        np.asarray(p.convert("L").resize((48, 48), 4))
        for p in (drawing(3), drawing(3).crop((9, 5, 290, 212)))
    )
    ratio = (281 / 207) / (300 / 220)
    there, back = best_fit(full, part, ratio), best_fit(part, full, 1 / ratio)
    assert there == pytest.approx(back) and there[0] > 0.8 and there[1] < 1
    assert best_fit(full, full, 1.0) == pytest.approx((1, 1))


def test_many_copies_make_one_set_and_few_pairs():
    """Each against each would be 300 squared."""
    noise = np.random.default_rng(0).normal(0, 1, (300, 48, 48))
    grey = np.clip(np.asarray(drawing(0).convert("L").resize((48, 48), 4)) + noise, 0, 255).astype(
        np.uint8
    )
    pairs = near_duplicates(facts_of(grey), np.arange(300))
    assert connected([pair[:2] for pair in pairs], 300) == [list(range(300))]
    assert len(pairs) <= 4 * 2 * 300


def test_gradients_are_alike_by_their_hashes_and_are_no_copies():
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:48, :48] / 47
    steep, way = rng.uniform(50, 200, (2000, 1, 1)), rng.uniform(0.9, 1, (2000, 1, 1))
    grey = (20 + steep * (x + way * y) / 2).astype(np.uint8)
    began = time.process_time()
    assert near_duplicates(facts_of(grey), np.arange(2000)) == []
    assert time.process_time() - began < 5  # to lay each pair over the other would take an hour
