"""Images for training and evaluation, compared with Pillow, torchvision's rule and timm; transforms of a config."""

from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from image_files import assert_alike, encode, in_memory, pillow, random_image
from PIL import Image
from promise import control, promise
from timm.data import create_transform

from finetune.data.decode import decode
from finetune.data.resize import PADDING, Prepare, resize
from finetune.data.transforms import eval_transform, train_transform
from finetune.system.messages import WrongUsage

SIDES = st.integers(1, 300)
SIZES = st.tuples(SIDES, SIDES)
KERNELS = ("bilinear", "bicubic")


@given(size=SIZES, new=SIZES)
@example(size=(300, 1), new=(5, 500))
@example(size=(1, 300), new=(7, 1))
@example(size=(64, 64), new=(64, 64))
def test_resize_equals_pillow_and_leaves_its_input_as_it_is(size, new):
    image = random_image(*size)
    before = image.copy()
    image.flags.writeable = False  # as a cache's are
    assert_alike(resize(image, *new), pillow(image, *new))
    np.testing.assert_array_equal(image, before)


def test_control_averages_over_areas_are_something_else():
    image = random_image(300, 400)
    areas = cv2.resize(image, (43, 32), interpolation=cv2.INTER_AREA)
    with pytest.raises(AssertionError):
        assert_alike(areas, pillow(image, 32, 43))


def reference(image: np.ndarray, image_size: int, mode: str) -> np.ndarray:
    """Resize to 8/7 as torchvision does with an image read by Pillow, and take the centre."""
    side, (height, width) = round(image_size * 256 / 224), image.shape[:2]
    shorter = min(height, width)
    new = (round(height * side / shorter), round(width * side / shorter))
    new = (side, side) if mode == "squash" else new
    top, left = (new[0] - image_size) // 2, (new[1] - image_size) // 2
    return pillow(image, *new)[top : top + image_size, left : left + image_size]


@promise("preparation")
@given(size=SIZES, image_size=st.integers(8, 120), mode=st.sampled_from(["shorter_side", "squash"]))
@example(size=(600, 40), image_size=224, mode="shorter_side")
def test_evaluation_equals_pillow(size, image_size, mode):
    image, transform = random_image(*size), eval_transform(image_size, mode)
    result = transform(image=image)["image"]
    assert_alike(result, reference(image, image_size, mode))
    np.testing.assert_array_equal(transform(image=image)["image"], result)


@pytest.mark.parametrize("share", [0.9, 0.95, 1.0])
@pytest.mark.parametrize("mode", ["shorter_side", "squash"])
def test_bicubic_evaluation_equals_what_timm_does(mode, share):
    # Of other sizes timm rounds sides and offsets another way: by a pixel.
    for image_size in {0.9: (216, 108), 0.95: (228, 114), 1.0: (240, 120)}[share]:
        crop = {"shorter_side": "center", "squash": "squash"}[mode]
        options = {"crop_pct": share, "crop_mode": crop, "mean": (0, 0, 0), "std": (1, 1, 1)}
        size = (3, image_size, image_size)
        theirs = create_transform(size, interpolation="bicubic", normalize=False, **options)
        for size in ((300, 400), (400, 300), (100, 120)):
            # Without black and white: where overshoot is cut off between the two directions their order tells, and
            # Pillow's is another for some sizes (12 grey levels in noise).
            image = 64 + random_image(*size) // 2
            expected = np.asarray(theirs(Image.fromarray(image))).transpose(1, 2, 0)
            ours = eval_transform(image_size, mode, "bicubic", share)(image=image)["image"]
            assert_alike(ours, expected)


@control("preparation")
def test_control_the_kernels_and_the_ways_to_resize_are_not_alike():
    image = random_image(300, 400)
    bilinear, bicubic = (eval_transform(224, "squash", k)(image=image)["image"] for k in KERNELS)
    with pytest.raises(AssertionError):
        assert_alike(bilinear, bicubic)
    image = np.zeros((100, 300, 3), np.uint8)
    image[:, :50] = image[:, -50:] = 255  # the ends of a long image
    assert eval_transform(32)(image=image)["image"].max() == 0
    assert eval_transform(32, "squash")(image=image)["image"].max() == 255


@given(size=SIZES, image_size=st.integers(8, 64))
@example(size=(28, 28), image_size=28)
def test_resize_whole_crops_nothing(size, image_size):
    image = random_image(*size)
    result = eval_transform(image_size, "whole")(image=image)["image"]
    assert_alike(result, pillow(image, image_size, image_size))


def squash_instead(monkeypatch):
    def whole(size: int, mode: str, *more: Any) -> Prepare:
        return Prepare(size, "whole", *more)

    monkeypatch.setattr("finetune.data.transforms.Prepare", whole)


@promise("pad", controls=[squash_instead])
@given(size=SIZES)
@example(size=(1, 300))
@example(size=(300, 100))
def test_resize_pad_equals_pillow_and_keeps_the_complete_image_in_the_middle(size):
    image = random_image(*size)
    result = eval_transform(32, "pad")(image=image)["image"]
    height, width = (max(1, round(side * 32 / max(size))) for side in size)
    top, left = (32 - height) // 2, (32 - width) // 2
    inside = np.zeros((32, 32), bool)
    inside[top : top + height, left : left + width] = True
    assert (result[~inside] == PADDING).all()
    assert_alike(result[inside], pillow(image, height, width).reshape(-1, 3))


# Memory


MODES = ("shorter_side", "squash", "whole", "pad")
TRANSFORMS = {mode: eval_transform(224, mode) for mode in MODES}
TRANSFORMS |= {"train": train_transform(224), "train pad": train_transform(224, is_padded=True)}


@pytest.mark.parametrize("name", ["shorter_side", "pad", "train"])
def test_a_line_of_pixels_is_no_bomb(name):
    content = encode(np.zeros((1, 70_000), np.uint8), "PNG")
    assert len(content) < 300

    def prepare() -> None:
        torch.set_num_threads(1)
        image = decode(content, shorter_side=256)
        assert TRANSFORMS[name](image=image)["image"].shape == (224, 224, 3)

    # 0.5 GB for the largest image that any may be; the line at a height of 256 would have 13.8 GB
    assert in_memory(2**30, prepare)


def test_a_column_is_made_low_before_it_is_made_wide():
    column = random_image(2_000_000, 2)
    assert in_memory(2**28, lambda: resize(column, 256, 256))  # otherwise 1.5 GB
    expected = resize(resize(column, 256, 2), 256, 256)
    np.testing.assert_array_equal(resize(column, 256, 256), expected)


# Training


@promise("preparation")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_random_crop_is_resized_as_in_evaluation(kernel):
    image = random_image(300, 400)
    transform = A.ReplayCompose([train_transform(32, interpolation=kernel).transforms[0]])
    for seed in range(20):
        transform.set_random_seed(seed)
        result = transform(image=image)
        left, top, right, bottom = result["replay"]["transforms"][0]["params"]["crop_coords"]
        crop = np.ascontiguousarray(image[top:bottom, left:right])
        same = eval_transform(32, "whole", kernel)(image=crop)["image"]
        np.testing.assert_array_equal(result["image"], same)


def test_training_crops_flips_and_follows_its_seed():
    # Columns in rising, rows in constant brightness: a flip is seen by the sign, a crop by the range.
    image = np.repeat(np.tile(np.arange(200, dtype=np.uint8), (200, 1))[:, :, None], 3, axis=2)
    transform = train_transform(32)
    flips, spans = [], []
    for seed in range(200):
        transform.set_random_seed(seed)
        result = transform(image=image)["image"]
        transform.set_random_seed(seed)
        np.testing.assert_array_equal(transform(image=image)["image"], result)
        row = result[0, :, 0].astype(int)
        flips.append(row[0] > row[-1])
        spans.append(abs(row[0] - row[-1]) / 200)
    assert 70 < sum(flips) < 130  # half of 200 flips, four deviations of 7
    # The crop's area is uniform in 8 to 100 %, its side ratio 3/4 to 4/3: mean width about 0.71 of the image.
    assert 0.6 < np.mean(spans) < 0.8 and min(spans) < 0.4 and max(spans) > 0.9


def test_without_crop_and_flip_images_are_those_of_evaluation():
    image, prepared = random_image(60, 50), eval_transform(32)
    invert = {"class_path": "InvertImg", "init_args": {"p": 1.0}}
    plain = train_transform(32, prepared=prepared)
    inverted = train_transform(32, [invert], prepared=prepared)
    expected = prepared(image=image)["image"]
    for seed in range(5):
        plain.set_random_seed(seed)
        np.testing.assert_array_equal(plain(image=image)["image"], expected)
        np.testing.assert_array_equal(inverted(image=image)["image"], 255 - expected)


@given(size=SIZES, image_size=st.integers(8, 97), seed=st.integers(0, 9))
def test_training_gives_the_size_and_stays_uint8(size, image_size, seed):
    transform = train_transform(image_size, [{"class_path": "albumentations.ColorJitter"}])
    transform.set_random_seed(seed)
    result = transform(image=random_image(*size))["image"]
    assert result.shape == (image_size, image_size, 3) and result.dtype == np.uint8


# --data.augmentations


def test_augmentations_come_after_crop_and_flip_in_their_order():
    specs = [
        {"class_path": "albumentations.InvertImg", "init_args": {"p": 1.0}},
        {"class_path": "Solarize", "init_args": {"threshold_range": [0.5, 0.5], "p": 1.0}},
    ]
    plain, more = train_transform(32), train_transform(32, specs)
    image = random_image(60, 80)
    plain.set_random_seed(3)
    more.set_random_seed(3)
    expected = 255 - plain(image=image)["image"]
    expected = np.where(expected >= 127.5, 255 - expected, expected)
    np.testing.assert_array_equal(more(image=image)["image"], expected)
    # the check of their output does not change how often they happen
    rare = {"class_path": "InvertImg", "init_args": {"p": 0.25}}
    assert [part.p for part in train_transform(32, [rare]).transforms] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"class_path": "albumentations.HorizontalFlp"}, ["mean 'HorizontalFlip'"]),
        ({"class_path": "albumentatons.Rotate"}, ["albumentatons.Rotate", "No module"]),
        ({"class_path": "Rotate", "init_args": {"limits": 3}}, ["'limits'", "mean 'limit'"]),
        ({"class_path": "RandomCrop"}, ["RandomCrop", "height", "width", "required"]),
        ({"class_path": "Rotate", "p": 0.5}, ["init_args", "'p'"]),
        ({"class_path": "albumentations.pytorch.ToTensorV2"}, ["(32, 32, 3) uint8"]),
        ({"class_path": "RandomCrop", "init_args": {"height": 99, "width": 99}}, ["fail on"]),
    ],
)
def test_augmentations_that_will_not_do_are_refused_in_a_line(spec, words):
    with pytest.raises((ValueError, WrongUsage)) as caught:
        train_transform(32, [spec])
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_opencv_starts_no_threads_of_its_own():
    assert cv2.getNumThreads() <= 1
