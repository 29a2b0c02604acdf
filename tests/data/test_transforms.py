"""The two pipelines, compared with Pillow, and transforms named in a config."""

import albumentations as A
import cv2
import numpy as np
import pytest
from image_files import assert_alike, pillow, random_image
from PIL import Image, ImageOps
from promise import control, promise
from timm.data import create_transform

from finetune.data.resize import PADDING
from finetune.data.transforms import (
    _KERNELS,
    build_transform,
    eval_transform,
    train_transform,
)


def reference(image: np.ndarray, image_size: int, mode: str) -> np.ndarray:
    """Resize to 8/7 as torchvision does with an image read by Pillow, and take the centre."""
    side, (height, width) = round(image_size * 256 / 224), image.shape[:2]
    shorter = min(height, width)
    squash = (side, side)
    new = (
        squash
        if mode == "squash"
        else (round(height * side / shorter), round(width * side / shorter))
    )
    top, left = (new[0] - image_size) // 2, (new[1] - image_size) // 2
    return pillow(image, *new)[top : top + image_size, left : left + image_size]


@promise("preparation")
@pytest.mark.parametrize("mode", ["shorter_side", "squash"])
@pytest.mark.parametrize("image_size", [32, 33, 224])
@pytest.mark.parametrize(
    "size", [(300, 400), (401, 299), (256, 256), (37, 37), (20, 30), (64, 31), (1, 1), (600, 40)]
)
def test_evaluation_equals_pillow(size, image_size, mode):
    image = random_image(*size)
    assert_alike(
        eval_transform(image_size, mode)(image=image)["image"], reference(image, image_size, mode)
    )


@pytest.mark.parametrize("share", [0.9, 0.95, 1.0])
@pytest.mark.parametrize("mode", ["shorter_side", "squash"])
def test_bicubic_evaluation_equals_what_timm_does(mode, share):
    # Of other sizes timm rounds sides and offsets another way: by a pixel.
    for image_size in {0.9: (216, 108), 0.95: (228, 114), 1.0: (240, 120)}[share]:
        crop = {"shorter_side": "center", "squash": "squash"}[mode]
        options = {
            "interpolation": "bicubic",
            "crop_pct": share,
            "crop_mode": crop,
            "normalize": False,
        }
        theirs = create_transform(
            (3, image_size, image_size), mean=(0, 0, 0), std=(1, 1, 1), **options
        )
        for size in ((300, 400), (400, 300), (100, 120)):
            # Without black and white: where overshoot is cut off between the two directions their order tells, and
            # Pillow's is another for some sizes (12 grey levels in noise).
            image = 64 + random_image(*size) // 2
            expected = theirs(Image.fromarray(image))
            ours = eval_transform(image_size, mode, "bicubic", share)(image=image)["image"]
            assert_alike(ours, np.asarray(expected).transpose(1, 2, 0))


def test_control_bilinear_is_something_else_than_bicubic():
    image = random_image(300, 400)
    bilinear, bicubic = (
        eval_transform(224, interpolation=kernel)(image=image)["image"] for kernel in _KERNELS
    )
    with pytest.raises(AssertionError):
        assert_alike(bilinear, bicubic)


@promise("preparation")
def test_training_resizes_as_evaluation_does():
    image = random_image(300, 400)
    for kernel in ("bilinear", "bicubic"):
        transform = A.ReplayCompose([train_transform(32, interpolation=kernel).transforms[0]])
        result = transform(image=image)
        left, top, right, bottom = result["replay"]["transforms"][0]["params"]["crop_coords"]
        crop = np.ascontiguousarray(image[top:bottom, left:right])
        same = eval_transform(32, "whole", kernel)(image=crop)["image"]
        assert np.array_equal(result["image"], same)


def test_a_random_crop_equals_pillow():
    transform, image = A.ReplayCompose([train_transform(32).transforms[0]]), random_image(300, 400)
    for seed in range(20):
        transform.set_random_seed(seed)
        result = transform(image=image)
        left, top, right, bottom = result["replay"]["transforms"][0]["params"]["crop_coords"]
        assert_alike(
            result["image"], pillow(np.ascontiguousarray(image[top:bottom, left:right]), 32, 32)
        )


def test_whole_crops_nothing_and_leaves_an_image_of_the_size_as_it_is():
    rng = np.random.default_rng(0)
    random_image = rng.integers(0, 256, (28, 28, 3), np.uint8)
    assert np.array_equal(eval_transform(28, "whole")(image=random_image)["image"], random_image)
    assert not np.array_equal(
        eval_transform(28, "squash")(image=random_image)["image"], random_image
    )
    wide = rng.integers(0, 256, (40, 90, 3), np.uint8)
    assert_alike(eval_transform(28, "whole")(image=wide)["image"], pillow(wide, 28, 28))


@promise("pad")
@pytest.mark.parametrize("size", [(100, 300), (300, 100), (33, 32), (20, 7), (1, 400)])
def test_pad_equals_pillow_and_keeps_the_complete_image_in_the_middle(size):
    image = random_image(*size)
    result = eval_transform(32, "pad")(image=image)["image"]
    scale = 32 / max(size)
    height, width = (max(1, round(side * scale)) for side in size)
    top, left = (32 - height) // 2, (32 - width) // 2
    inside = np.zeros((32, 32), bool)
    inside[top : top + height, left : left + width] = True
    assert (result[~inside] == PADDING).all()
    assert_alike(result[inside], pillow(image, height, width).reshape(-1, 3))


def test_pad_is_what_pillow_pads():
    image = random_image(100, 320)
    theirs = ImageOps.pad(
        Image.fromarray(image), (32, 32), Image.Resampling.BILINEAR, color=PADDING
    )
    assert_alike(eval_transform(32, "pad")(image=image)["image"], np.asarray(theirs))
    with pytest.raises(AssertionError):  # the control
        assert_alike(eval_transform(32, "whole")(image=image)["image"], np.asarray(theirs))


def test_a_training_crop_of_pad_is_one_of_the_padded_square():
    image = np.full((100, 300, 3), 255, np.uint8)
    transform = train_transform(32, min_crop=0.35, is_padded=True)
    shares = []
    for seed in range(200):
        transform.set_random_seed(seed)
        inside = (transform(image=image)["image"] > 200).all(axis=2)
        shares.append(inside.any(axis=1).mean())
        assert inside.any(axis=0).all()  # along the longer side there is no padding
    # a third of the complete square, and more of a smaller crop
    assert 0.2 < min(shares) < 0.4 < max(shares) < 0.65


def test_prepared_images_are_neither_cropped_nor_flipped():
    random_image = np.random.default_rng(0).integers(0, 256, (60, 50, 3), np.uint8)
    prepared = eval_transform(32)
    plain = train_transform(32, prepared=prepared)
    for seed in range(5):
        plain.set_random_seed(seed)
        assert np.array_equal(
            plain(image=random_image)["image"], prepared(image=random_image)["image"]
        )
    inverted = train_transform(
        32, [{"class_path": "InvertImg", "init_args": {"p": 1.0}}], prepared=prepared
    )
    assert np.array_equal(
        inverted(image=random_image)["image"], 255 - prepared(image=random_image)["image"]
    )


@control("preparation")
def test_control_the_two_ways_to_resize_differ_and_squash_keeps_more():
    image = np.zeros((100, 300, 3), np.uint8)
    image[:, :50] = image[:, -50:] = 255  # the ends of a long image
    assert eval_transform(32)(image=image)["image"].max() == 0
    assert eval_transform(32, "squash")(image=image)["image"].max() == 255


def test_evaluation_is_not_random():
    transform, image = eval_transform(32), random_image(50, 70)
    np.testing.assert_array_equal(transform(image=image)["image"], transform(image=image)["image"])


@pytest.mark.parametrize("image_size", [8, 32, 97])
@pytest.mark.parametrize("size", [(300, 400), (20, 30), (1, 1), (500, 20)])
def test_training_gives_the_size_and_stays_uint8(size, image_size):
    transform = train_transform(image_size, [{"class_path": "albumentations.ColorJitter"}])
    for seed in range(5):
        transform.set_random_seed(seed)
        result = transform(image=random_image(*size))["image"]
        assert result.shape == (image_size, image_size, 3) and result.dtype == np.uint8


def test_training_crops_flips_and_follows_its_seed():
    # Columns in rising, rows in constant brightness: a flip is seen by the sign, a crop by the range.
    image = np.repeat(np.tile(np.arange(200, dtype=np.uint8), (200, 1))[:, :, None], 3, axis=2)
    transform = train_transform(32)
    seen = []
    spans = []
    for seed in range(200):
        transform.set_random_seed(seed)
        result = transform(image=image)["image"]
        transform.set_random_seed(seed)
        np.testing.assert_array_equal(transform(image=image)["image"], result)
        row = result[0, :, 0].astype(int)
        seen.append(row[0] > row[-1])
        spans.append(abs(row[0] - row[-1]) / 200)
    assert 70 < sum(seen) < 130  # half of 200 flips, four deviations of 7
    # The crop's area is uniform in 8 to 100 %, its side ratio 3/4 to 4/3: mean width about 0.71 of the image.
    assert 0.6 < np.mean(spans) < 0.8 and min(spans) < 0.4 and max(spans) > 0.9


def test_shrinking_averages_where_taking_single_pixels_would_make_patterns():
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255  # finer than the result can show: only grey is right
    for transform in (eval_transform(32), eval_transform(32, "squash"), train_transform(32)):
        transform.set_random_seed(0)
        result = transform(image=stripes)["image"].astype(int)
        assert np.abs(result - 127.5).max() < 30
    linear = cv2.resize(stripes, (37, 37), interpolation=cv2.INTER_LINEAR).astype(int)
    assert np.abs(linear - 127.5).max() > 100  # the control


def test_more_transforms_come_after_the_book_s():
    specs = [
        {"class_path": "albumentations.InvertImg", "init_args": {"p": 1.0}},
        {"class_path": "Solarize", "init_args": {"threshold_range": [0.5, 0.5], "p": 1.0}},
    ]
    plain = train_transform(32)
    more = train_transform(32, specs)
    image = random_image(60, 80)
    plain.set_random_seed(3)
    more.set_random_seed(3)
    expected = 255 - plain(image=image)["image"]
    expected = np.where(expected >= 127.5, 255 - expected, expected)
    np.testing.assert_array_equal(more(image=image)["image"], expected)


def test_a_transform_by_its_class_and_arguments():
    transform = build_transform(
        {"class_path": "albumentations.Rotate", "init_args": {"limit": [-10, 20], "p": 0.3}}
    )
    assert isinstance(transform, A.Rotate) and transform.limit == (-10, 20) and transform.p == 0.3
    for spec in (
        {"class_path": "Rotate"},
        {"class_path": "albumentations.Rotate", "init_args": None},
    ):
        # albumentations is where one looks by default
        assert isinstance(build_transform(spec), A.Rotate)


ERRORS = [
    (
        {"class_path": "albumentations.HorizontalFlp"},
        ["'HorizontalFlp'", "did you mean 'HorizontalFlip'"],
    ),
    ({"class_path": "albumentatons.Rotate"}, ["albumentatons.Rotate", "No module"]),
    (
        {"class_path": "albumentations.BboxParams", "init_args": {"format": "coco"}},
        ["BboxParams", "transform"],
    ),
    ({"class_path": "os.getcwd"}, ["os.getcwd", "transform"]),
    (
        {"class_path": "Rotate", "init_args": {"limits": 3}},
        ["Rotate", "'limits'", "did you mean 'limit'"],
    ),
    (
        {"class_path": "HorizontalFlip", "init_args": {"chance": 1}},
        ["HorizontalFlip", "'chance'", "valid are p"],
    ),
    (
        {"class_path": "HorizontalFlip", "init_args": {"p": 2}},
        ["HorizontalFlip", "p=2", "less than or equal to 1"],
    ),
    ({"class_path": "Rotate", "init_args": {"limit": "far"}}, ["Rotate", "limit='far'", "number"]),
    ({"class_path": "RandomCrop"}, ["RandomCrop", "height", "width", "required"]),
    ({"class_path": "Rotate", "p": 0.5}, ["class_path and init_args", "'p'"]),
    ({"init_args": {"p": 1}}, ["class_path and init_args"]),
]


@pytest.mark.parametrize(("spec", "words"), ERRORS)
def test_a_transform_that_is_not_right_is_named_in_a_line(spec, words):
    with pytest.raises(ValueError) as caught:
        build_transform(spec)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message and len(message) < 200, (
        message
    )


@pytest.mark.parametrize(
    ("name", "init_args"),
    [
        ("Normalize", {}),
        ("ToFloat", {"p": 0.01}),  # seen although it hardly ever happens
        ("RandomCrop", {"height": 16, "width": 16}),
        ("albumentations.pytorch.ToTensorV2", {}),
    ],
)
def test_what_leaves_uint8_or_the_size_is_refused(name, init_args):
    with pytest.raises(
        ValueError, match=r"must give \(32, 32, 3\) uint8 .* normalisation is inside the network"
    ):
        train_transform(32, [{"class_path": name, "init_args": init_args}])


def test_the_check_for_that_does_not_change_how_often_a_transform_happens():
    transform = train_transform(32, [{"class_path": "InvertImg", "init_args": {"p": 0.25}}])
    assert [part.p for part in transform.transforms] == [1.0, 0.5, 0.25]


def test_a_transform_that_fails_says_so_at_once():
    with pytest.raises(ValueError, match="transforms fail on an image") as caught:
        train_transform(
            32, [{"class_path": "RandomCrop", "init_args": {"height": 99, "width": 99}}]
        )
    assert "\n" not in str(caught.value)


def test_opencv_starts_no_threads_of_its_own():
    assert cv2.getNumThreads() <= 1
