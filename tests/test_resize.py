"""Pictures brought to size against Pillow."""

import cv2
import numpy as np
import pytest
from PIL import Image

from finetune.resize import resize


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3)).astype(np.uint8)


def pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))


# They round their weights and the step between the directions each in its own way.
def assert_alike(result: np.ndarray, expected: np.ndarray) -> None:
    difference = np.abs(result.astype(int) - expected)
    assert result.dtype == np.uint8 and result.shape == expected.shape
    assert difference.max() <= 2 and difference.mean() < 0.3


@pytest.mark.parametrize("new", [(32, 32), (1, 7), (7, 1), (5, 500), (400, 300)])
@pytest.mark.parametrize("size", [(300, 400), (300, 1), (1, 300), (1, 1), (64, 64)])
def test_equals_pillow(size, new):
    image = picture(*size)
    assert_alike(resize(image, *new), pillow(image, *new))


def test_control_averages_over_areas_are_something_else():
    image = picture(300, 400)
    areas = cv2.resize(image, (43, 32), interpolation=cv2.INTER_AREA)
    with pytest.raises(AssertionError):
        assert_alike(areas, pillow(image, 32, 43))


def test_a_picture_that_may_not_be_written_to_is_resized_in_silence_and_left_as_it_is():
    image = picture(60, 50)
    before = image.copy()
    image.flags.writeable = False
    for size in ((30, 25), (90, 70), (60, 50), (30, 70)):
        assert_alike(resize(image, *size), pillow(image, *size))
    np.testing.assert_array_equal(image, before)
