"""What the parts of a pipeline draw is a function of the seed, and independent of each other."""

from itertools import combinations

import albumentations as A
import numpy as np
import pytest
from image_files import random_image
from promise import control, promise
from scipy import stats

from finetune.data.samplers import augmentation_seed
from finetune.data.transforms import build_transform, set_random_seed, train_transform

NUM = 3000
JITTER = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.02}
PARTS = {  # of each, what its draws are called below
    "crop": ("area", "aspect", "x", "y"),
    "flip": ("flipped",),
    "jitter": ("jittered", "brightness", "contrast", "saturation", "hue"),
    "choice": ("chosen",),
    "inner": ("inverted",),
}
# The seeds are fixed, so these tests give the same numbers each time; the level is that of all of them together.
LEVEL = 1e-3


def pipeline() -> A.ReplayCompose:
    """hotdog.yaml's, and behind it parts within parts."""
    parts = train_transform(
        32, [{"class_path": "ColorJitter", "init_args": JITTER}], min_crop=0.35
    ).transforms
    inner = A.Sequential([A.InvertImg(p=0.5)], p=1)
    return A.ReplayCompose([*parts, A.OneOf([A.VerticalFlip(p=1), A.Transpose(p=1)], p=1), inner])


def drawn(num: int, seed_pipeline, keys=lambda i: (0, i % 50, i // 50)) -> dict[str, np.ndarray]:
    """Return each number that the parts drew for `num` keys of (seed, epoch, index); nan where a part did nothing."""
    transform = pipeline()
    image = random_image(200, 160)
    rows = []
    for i in range(num):
        seed_pipeline(transform, augmentation_seed(*keys(i)))
        crop, flip, jitter, choice, inner = transform(image=image)["replay"]["transforms"]
        left, top, right, bottom = crop["params"]["crop_coords"]
        width, height = right - left, bottom - top
        rows.append(
            {
                "area": width * height / 32000,
                "aspect": np.log(width / height),
                "x": left / max(1, 160 - width),
                "y": top / max(1, 200 - height),
                "flipped": flip["applied"],
                "jittered": jitter["applied"],
                **{
                    name: (jitter["params"] or {}).get(name, np.nan) for name in PARTS["jitter"][1:]
                },
                "chosen": choice["transforms"][0]["applied"],
                "inverted": inner["transforms"][0]["applied"],
            }
        )
    return {name: np.array([row[name] for row in rows], float) for name in rows[0]}


def ours(transform: A.ReplayCompose, seed: int) -> None:
    set_random_seed(transform, seed)


def all_alike(transform: A.ReplayCompose, seed: int) -> None:
    transform.set_random_seed(seed)


@pytest.fixture(scope="module")
def draws() -> dict[str, np.ndarray]:
    return drawn(NUM, ours)


def quarters(values: np.ndarray) -> np.ndarray:
    """Return which of up to four parts of equal size, or which of two values, each number is in."""
    return (
        np.searchsorted(np.unique(np.quantile(values, (0.25, 0.5, 0.75))), values)
        if len(set(values)) > 2
        else values
    )


def p_of_pair(a: np.ndarray, b: np.ndarray) -> float:
    """Return how likely counts at least so uneven are where two rows of numbers have nothing to do with each other."""
    both = ~(np.isnan(a) | np.isnan(b))
    counts = stats.contingency.crosstab(quarters(a[both]), quarters(b[both])).count
    return float(stats.chi2_contingency(counts).pvalue)


def pairs() -> list[tuple[str, str]]:
    """Return all numbers of different parts, and the factors of one: a crop's own depend on each other, to fit in."""
    between = [(a, b) for one, two in combinations(PARTS.values(), 2) for a in one for b in two]
    return [*between, *combinations(PARTS["jitter"][1:], 2)]


@promise("random-numbers")
@pytest.mark.slow
def test_no_part_knows_what_another_drew(draws):
    # Quarters by quarters see any dependence, not only one that rises: 56 pairs, each at a 56th of the level.
    worst = {pair: p_of_pair(draws[pair[0]], draws[pair[1]]) for pair in pairs()}
    assert len(worst) == 56 and min(worst.values()) > LEVEL / len(worst), min(
        worst.items(), key=lambda item: item[1]
    )
    # A correlation of independent numbers is within four standard errors.
    for a, b in pairs():
        both = ~(np.isnan(draws[a]) | np.isnan(draws[b]))
        assert abs(np.corrcoef(draws[a][both], draws[b][both])[0, 1]) < 4 / np.sqrt(both.sum()), (
            a,
            b,
        )


@control("random-numbers")
def test_control_with_one_seed_for_all_they_copy_each_other():
    copied = drawn(400, all_alike)
    # both are one number, held against 0.5
    assert np.array_equal(copied["flipped"], copied["jittered"])
    assert copied["area"][copied["flipped"] == 1].max() < 0.7 < copied["area"].max()
    assert p_of_pair(copied["flipped"], copied["area"]) < 1e-20
    jittered = copied["jittered"] == 1
    assert np.corrcoef(copied["brightness"][jittered], copied["aspect"][jittered])[0, 1] > 0.9
    same = sum(
        p_of_pair(copied[a], copied[b]) < LEVEL / 50 for a, b in pairs() if len(set(copied[b])) > 1
    )
    assert same > 5  # nine


def pixels(transform: A.Compose) -> np.ndarray:
    return transform(image=random_image(40, 50))["image"]


def test_a_seed_gives_the_same_image_whatever_was_drawn_before():
    first, second = pipeline(), pipeline()
    for seed in (0, 1, 2**32 - 1, 5, 5):
        set_random_seed(first, seed)
        set_random_seed(second, seed)
        np.testing.assert_array_equal(pixels(first), pixels(second))
        second(image=random_image(30, 20))
    set_random_seed(first, 6)
    set_random_seed(second, 7)
    assert not np.array_equal(pixels(first), pixels(second))


def test_a_part_more_at_the_end_leaves_the_others_as_they_were():
    inverted = {"class_path": "InvertImg", "init_args": {"p": 1.0}}
    short, long = train_transform(32), train_transform(32, [inverted])
    for seed in range(5):
        set_random_seed(short, seed)
        set_random_seed(long, seed)
        np.testing.assert_array_equal(pixels(short), 255 - pixels(long))


class OwnGenerator(A.HorizontalFlip):
    def set_random_seed(self, seed: int | None) -> None:
        """Seed another generator than the pipeline's."""


def test_a_transform_that_seeds_a_generator_of_its_own_is_refused():
    with pytest.raises(ValueError, match="OwnGenerator.*--seed"):
        build_transform({"class_path": f"{__name__}.OwnGenerator"})
