"""torchvision's TrivialAugment as a transform of a pipeline."""

import numpy as np
import torch
from image_files import random_image

from finetune.data.transforms import TrivialAugment, set_random_seed, train_transform


def seeded(transform, seed: int) -> np.ndarray:
    set_random_seed(transform, seed)
    return transform(image=random_image(60, 80))["image"]


def test_an_image_is_a_function_of_its_seed_alone():
    one, two = (train_transform(32, [{"class_path": "TrivialAugment"}]) for _ in range(2))
    before = torch.random.get_rng_state()
    for seed in (5, 1, 5):
        np.testing.assert_array_equal(seeded(one, seed), seeded(two, seed))
        two(image=random_image(60, 80))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len({seeded(one, seed).tobytes() for seed in range(6)}) == 6


def test_it_leaves_its_input_unchanged_and_returns_a_writable_image():
    image = random_image(32, 32)
    before = image.copy()
    image.flags.writeable = False  # as a cache's are
    augment = TrivialAugment()
    results = [augment.apply(image, seed=seed) for seed in range(12)]
    for result in results:
        assert result.flags.writeable and result.dtype == np.uint8 and result.shape == image.shape
    assert len({result.tobytes() for result in results}) > 6
    np.testing.assert_array_equal(image, before)
