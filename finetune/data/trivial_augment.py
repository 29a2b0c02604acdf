"""TrivialAugment: one random operation at one random strength per image, without anything to tune.

Source: Müller and Hutter 2021 (arXiv:2103.10158), by torchvision's `TrivialAugmentWide`.
"""

from typing import Any

import albumentations as A
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image


class TrivialAugment(A.ImageOnlyTransform):
    """torchvision's `TrivialAugmentWide`, as a function of the seed of this transform.

    Args:
        p: Probability of applying the transform.
    """

    def __init__(self, p: float = 1.0) -> None:
        from torchvision.transforms.v2 import TrivialAugmentWide  # slow to import

        super().__init__(p=p)
        self._augment = TrivialAugmentWide()

    def get_params(self) -> dict[str, Any]:
        return {"seed": self.py_random.getrandbits(32)}

    def apply(self, img: NDArray[np.uint8], seed: int, **params: Any) -> NDArray[np.uint8]:
        with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's global generator
            torch.default_generator.manual_seed(seed)
            # a copy, because Pillow's array is read-only and the next transform may write to it
            return np.array(self._augment(Image.fromarray(img)))
