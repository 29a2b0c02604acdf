"""Mixup, which blends two training images, and CutMix, which pastes a box of one into the other.

The partner and the share are functions of (seed, epoch, index), not of the batch. They are the same on any number of
devices, and after resuming in the middle of an epoch.

Source: Zhang et al. 2017 (arXiv:1710.09412); Yun et al. 2019 (arXiv:1905.04899).
"""

import math
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from finetune.data.samplers import MIXING

# Shapes: h and w pixels, the same for both transformed images.


class Mix(NamedTuple):
    """The random draw for one image.

    Attributes:
        partner: Index of the other image.
        share: Share of the ground image, in [0, 1], before a box is clipped at the edge.
        centre: Centre of the pasted box, as shares of height and width; None for mixup.
    """

    partner: int
    share: float
    centre: tuple[float, float] | None

    def apply(
        self, image: NDArray[np.uint8], other: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint8], float]:
        """Return the mixed image (h, w, 3), and the share of `image` in it, which is at least 0.5.

        To ensure this, the ground is `image` or `other`. If it were always `image`, an image could be nearly absent in
        an epoch, because half of the shares of a weak blend are nearly 0. The distribution of mixed pairs is the same.

        A blend is rounded to uint8, which is off by at most half a grey level. A batch is then a quarter of the size of
        one in float32. The share of CutMix is computed from the area of the box in pixels.
        """
        height, width = image.shape[:2]
        top, left, bottom, right = (0, 0, 0, 0) if self.centre is None else self.box(height, width)
        ground_share = (
            self.share
            if self.centre is None
            else 1 - (bottom - top) * (right - left) / (height * width)
        )
        ground, filling = (image, other) if ground_share >= 0.5 else (other, image)
        if self.centre is None:
            blend = cv2.addWeighted(ground, ground_share, filling, 1 - ground_share, 0.0)
            mixed = np.asarray(blend, np.uint8)
        else:
            mixed = ground.copy()
            mixed[top:bottom, left:right] = filling[top:bottom, left:right]
        return mixed, max(ground_share, 1 - ground_share)

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, bottom and right of the pasted box, in pixels."""
        assert self.centre is not None
        side = math.sqrt(1 - self.share)
        sides = (height, width)
        middle = [int(place * num) for place, num in zip(self.centre, sides, strict=True)]
        half = [int(side * num / 2) for num in sides]
        top, left = (max(0, m - h) for m, h in zip(middle, half, strict=True))
        bottom, right = (min(num, m + h) for m, h, num in zip(middle, half, sides, strict=True))
        return top, left, bottom, right


class Mixing(NamedTuple):
    """The strengths of mixup and CutMix.

    Attributes:
        mixup: Shares are drawn from Beta(mixup, mixup); 0 turns mixup off.
        cutmix: The same for CutMix. With both, each image draws one of the two with equal probability.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def draw(self, seed: int, epoch: int, index: int, num_images: int) -> Mix | None:
        """Return the draw for image `index` in `epoch`; None without mixing.

        The partner is drawn uniformly from the other training images.
        """
        if not self.mixup and not self.cutmix:
            return None
        rng = np.random.default_rng((MIXING, seed, epoch, index))
        partner = (index + 1 + int(rng.integers(max(1, num_images - 1)))) % num_images
        # Always draw all values, so that the settings do not shift the random stream.
        is_box = rng.random() < 0.5
        centre = (float(rng.random()), float(rng.random()))
        is_box = bool(self.cutmix) and (is_box or not self.mixup)
        strength = self.cutmix if is_box else self.mixup
        return Mix(partner, float(rng.beta(strength, strength)), centre if is_box else None)
