"""Resized images, compared with Pillow."""

import cv2
import numpy as np
import pytest
import torch
from image_files import assert_alike, encode, in_memory, pillow, random_image

from finetune.data import resize as module
from finetune.data.decode import decode
from finetune.data.resize import resize
from finetune.data.transforms import ResizeMode, eval_transform, train_transform

MODES: tuple[ResizeMode, ...] = ("shorter_side", "squash", "whole", "pad")
EVALUATION = {mode: eval_transform(224, mode) for mode in MODES}


@pytest.mark.parametrize("new", [(32, 32), (1, 7), (7, 1), (5, 500), (400, 300)])
@pytest.mark.parametrize("size", [(300, 400), (300, 1), (1, 300), (1, 1), (64, 64)])
def test_equals_pillow(size, new):
    image = random_image(*size)
    assert_alike(resize(image, *new), pillow(image, *new))


def test_control_averages_over_areas_are_something_else():
    image = random_image(300, 400)
    areas = cv2.resize(image, (43, 32), interpolation=cv2.INTER_AREA)
    with pytest.raises(AssertionError):
        assert_alike(areas, pillow(image, 32, 43))


def test_an_image_that_may_not_be_written_to_is_resized_in_silence_and_left_as_it_is():
    image = random_image(60, 50)
    before = image.copy()
    image.flags.writeable = False
    for size in ((30, 25), (90, 70), (60, 50), (30, 70)):
        assert_alike(resize(image, *size), pillow(image, *size))
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize(
    "transform", [*EVALUATION.values(), train_transform(224), train_transform(224, is_padded=True)]
)
def test_a_line_of_pixels_is_no_bomb(transform, monkeypatch):
    content = encode(np.zeros((1, 70_000), np.uint8), "PNG")
    assert len(content) < 300

    def prepare() -> None:
        torch.set_num_threads(1)
        image = decode(content, shorter_side=256)
        assert transform(image=image)["image"].shape == (224, 224, 3)

    # 0.5 GB for an image of `MAX_PIXELS`, the most that any may have
    assert in_memory(2**30, prepare)
    if transform is EVALUATION["shorter_side"]:
        monkeypatch.setattr(module, "MAX_PIXELS", 2**60)
        assert not in_memory(2**33, prepare)  # the control: 13.8 GB


def test_a_column_is_made_low_before_it_is_made_wide(monkeypatch):
    column = random_image(2_000_000, 2)
    assert in_memory(2**28, lambda: resize(column, 256, 256))
    np.testing.assert_array_equal(
        resize(column, 256, 256), resize(resize(column, 256, 2), 256, 256)
    )
    monkeypatch.setattr(module, "MAX_PIXELS", 2**60)
    assert not in_memory(2**28, lambda: resize(column, 256, 256))  # the control: 1.5 GB


@pytest.mark.parametrize("shape", [(1, 3000), (3000, 1), (2, 2999), (3, 3000)])
def test_what_is_cut_to_its_middle_looks_the_same(shape, monkeypatch):
    # Steps of one grey level, as coarse as the result's rounding; it may lie a pixel of the result beside.
    ramp = (
        np.linspace(0, 250, max(shape))
        .astype(np.uint8)
        .reshape((1, -1) if shape[0] < shape[1] else (-1, 1))
    )
    image = np.repeat(np.broadcast_to(ramp, shape)[:, :, None], 3, axis=2)
    transform = eval_transform(32)
    full = transform(image=image)["image"].astype(int)
    monkeypatch.setattr(module, "MAX_PIXELS", 37 * 1000)
    cut = transform(image=image)["image"]
    assert np.abs(cut - full).max() <= 1
    monkeypatch.setattr(module, "_middle", lambda random_image, num: random_image[:num, :num])
    assert np.abs(transform(image=image)["image"] - full).max() > 50  # the control: the beginning
