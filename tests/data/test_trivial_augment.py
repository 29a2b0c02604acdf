"""Each operation, compared with torchvision's, and the draws: uniform, and independent of other transforms."""

import albumentations as A
import numpy as np
import pytest
import torch
from image_files import random_image
from PIL import Image
from scipy import stats
from torchvision.transforms import InterpolationMode, v2

from finetune.data.samplers import augmentation_seed
from finetune.data.transforms import build_transform, set_random_seed, train_transform
from finetune.data.trivial_augment import NUM_STEPS, OPERATIONS, TrivialAugment

REFERENCE = v2.TrivialAugmentWide()
NUM = 4000
LEVEL = 1e-3  # the seeds are fixed, so these tests give the same numbers each time
SIZES = [(33, 50), (224, 224)]


def by_torchvision(image: Image.Image | torch.Tensor, name: str, strength: float) -> np.ndarray:
    result = REFERENCE._apply_image_or_video_transform(
        image, name, strength, interpolation=InterpolationMode.NEAREST, fill=REFERENCE._fill
    )
    return (
        np.asarray(result) if isinstance(result, Image.Image) else result.permute(1, 2, 0).numpy()
    )


def ours(image: np.ndarray, name: str, strength: float) -> np.ndarray:
    return TrivialAugment().apply(image, name, strength)


def square() -> np.ndarray:
    """An image as after the training crop, with little contrast."""
    return random_image(96, 96) // 2 + 40


def strengths(name: str) -> list[float]:
    signs = (1, -1) if OPERATIONS[name].is_signed else (1,)
    return [sign * value for value in dict.fromkeys(OPERATIONS[name].strengths) for sign in signs]


def test_the_space_is_torchvision_s():
    assert (
        list(OPERATIONS) == list(REFERENCE._AUGMENTATION_SPACE)
        and REFERENCE.num_magnitude_bins == NUM_STEPS
    )
    for name, (magnitudes, is_signed) in REFERENCE._AUGMENTATION_SPACE.items():
        expected = magnitudes(NUM_STEPS, 50, 60)
        assert OPERATIONS[name].is_signed == is_signed
        assert len(OPERATIONS[name].strengths) == NUM_STEPS
        if expected is None:
            assert set(OPERATIONS[name].strengths) == {0.0}
        else:  # theirs are float32
            np.testing.assert_allclose(
                OPERATIONS[name].strengths, expected.numpy(), rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_each_operation_at_each_strength_is_torchvision_s_to_the_bit(name, size):
    image = random_image(*size)
    for strength in strengths(name):
        expected = by_torchvision(Image.fromarray(image), name, strength)
        np.testing.assert_array_equal(ours(image, name, strength), expected, err_msg=str(strength))


@pytest.mark.parametrize("name", OPERATIONS)
def test_and_that_of_code_without_pillow(name):
    """torchvision's operations on tensors are other code; colours are rounded otherwise there, and edges of pixels."""
    image = square()
    for strength in strengths(name):
        expected = by_torchvision(torch.from_numpy(image).permute(2, 0, 1), name, strength)
        off = np.abs(ours(image, name, strength).astype(int) - expected).max(axis=2)
        # A place that falls between two pixels, or a level at the threshold, goes either way: 2.3 % were seen.
        assert (off > 1).mean() < 0.04, strength


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "Identity"])
def test_control_half_the_strength_is_another_image(name):
    image, strongest = square(), OPERATIONS[name].strengths[-1 if name != "Solarize" else 10]
    if strongest:
        weaker = ours(image, name, strongest / 2)
        assert (
            np.abs(ours(image, name, strongest).astype(int) - weaker).max(axis=2) > 1
        ).mean() > 0.04
    else:
        assert not np.array_equal(ours(image, name, 0.0), image)


def drawn(num: int, keys=lambda i: (0, i % 50, i // 50)) -> list[dict]:
    """Return what crop, flip and two TrivialAugments behind them drew for `num` keys of (seed, epoch, index)."""
    specs = [{"class_path": "TrivialAugment"}] * 2
    transform, image = A.ReplayCompose(train_transform(32, specs).transforms), random_image(40, 50)
    rows = []
    for i in range(num):
        set_random_seed(transform, augmentation_seed(*keys(i)))
        rows.append(transform(image=image)["replay"]["transforms"])
    return rows


@pytest.fixture(scope="module")
def draws() -> list[dict]:
    return drawn(NUM)


@pytest.mark.slow
def test_operations_steps_and_signs_are_drawn_alike_often(draws):
    names = []
    steps = []
    is_negative = []
    for row in draws:
        name, strength = row[2]["params"]["operation"], row[2]["params"]["strength"]
        names.append(list(OPERATIONS).index(name))
        # each step has a strength of its own
        if name not in ("Posterize", "Identity", "AutoContrast", "Equalize"):
            steps.append(list(OPERATIONS[name].strengths).index(abs(strength)))
            if OPERATIONS[name].is_signed and strength:
                is_negative.append(strength < 0)
            assert OPERATIONS[name].is_signed or strength >= 0
    assert stats.chisquare(np.bincount(names, minlength=len(OPERATIONS))).pvalue > LEVEL
    assert stats.chisquare(np.bincount(steps, minlength=NUM_STEPS)).pvalue > LEVEL
    assert stats.binomtest(sum(is_negative), len(is_negative)).pvalue > LEVEL


@pytest.mark.slow
def test_what_is_drawn_says_nothing_about_the_other_transforms(draws):
    first, second = (
        [list(OPERATIONS).index(row[i]["params"]["operation"]) for row in draws] for i in (2, 3)
    )
    flipped = [row[1]["applied"] for row in draws]
    left, top, right, bottom = np.array([row[0]["params"]["crop_coords"] for row in draws]).T
    area = (right - left) * (bottom - top)
    for other in (second, flipped, np.digitize(area, np.quantile(area, (0.25, 0.5, 0.75)))):
        counts = stats.contingency.crosstab(first, other).count
        assert stats.chi2_contingency(counts).pvalue > LEVEL / 3
    # Control: one operation determines its own result completely.
    assert stats.chi2_contingency(stats.contingency.crosstab(first, first).count).pvalue < 1e-20


def test_an_image_is_a_function_of_its_seed_alone():
    one, two = (train_transform(32, [{"class_path": "TrivialAugment"}]) for _ in range(2))
    for seed in (5, 1, 5):
        np.testing.assert_array_equal(seeded(one, seed), seeded(two, seed))
        two(image=random_image(60, 80))
    assert len({seeded(one, seed).tobytes() for seed in range(20)}) == 20


def seeded(transform: A.Compose, seed: int) -> np.ndarray:
    set_random_seed(transform, seed)
    return transform(image=random_image(60, 80))["image"]


def test_it_leaves_its_input_unchanged_and_returns_a_writable_image():
    image = random_image(32, 32)
    before = image.copy()
    image.flags.writeable = False  # as a cache's are
    for name in OPERATIONS:
        result = ours(image, name, OPERATIONS[name].strengths[20])
        assert result.flags.writeable and result.dtype == np.uint8 and result.shape == image.shape
    np.testing.assert_array_equal(image, before)


def test_it_is_one_name_among_albumentations_and_suggested_when_misspelt():
    assert isinstance(
        build_transform({"class_path": "TrivialAugment", "init_args": {"p": 0.5}}), TrivialAugment
    )
    with pytest.raises(
        ValueError, match="no transform 'TrivialAugmnt' in albumentations; did you mean 'TrivialAug"
    ):
        build_transform({"class_path": "TrivialAugmnt"})
    with pytest.raises(ValueError, match="TrivialAugment has no argument 'strength'"):
        build_transform({"class_path": "TrivialAugment", "init_args": {"strength": 1}})
