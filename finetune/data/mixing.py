"""Two training pictures as one: mixup blends them, CutMix pastes a box of one into the other.

Which other picture, and how much of it, are functions of (seed, epoch, index), not of the batch: the same on any number
of devices, and in an epoch that a resumed run enters in the middle.

Source: Zhang et al. 2017 (arXiv:1710.09412); Yun et al. 2019 (arXiv:1905.04899).
"""

import math
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from finetune.data.samplers import MIXING

# Shapes: h and w pixels, of two transformed pictures alike.


class Mix(NamedTuple):
    """What was drawn for one picture.

    Attributes:
        partner: Index of the other picture.
        share: How much the ground of the two keeps, in [0, 1], before a box is cut off at the edge.
        centre: Of the box of the ground that is filled, as shares of height and width; None where they are blended.
    """

    partner: int
    share: float
    centre: tuple[float, float] | None

    def apply(
        self, image: NDArray[np.uint8], other: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint8], float]:
        """Return both (h, w, 3) as one, and the share that the first has in it: at least a half.

        The ground is whichever of the two makes it so. The pairs that there may be are the same as if it were always
        the first, but each picture is seen in each epoch: half of the shares of a weak blend are nearly 0.

        A blend is rounded to the nearest grey level, as every picture is, so that a batch stays a quarter the size of
        one in float32: it is half a level off at most. A box has whole pixels; its area says the share.
        """
        height, width = image.shape[:2]
        top, left, bottom, right = (0, 0, 0, 0) if self.centre is None else self.box(height, width)
        kept = (
            self.share
            if self.centre is None
            else 1 - (bottom - top) * (right - left) / (height * width)
        )
        ground, filling = (image, other) if kept >= 0.5 else (other, image)
        if self.centre is None:
            mixed = np.asarray(cv2.addWeighted(ground, kept, filling, 1 - kept, 0.0), np.uint8)
        else:
            mixed = ground.copy()
            mixed[top:bottom, left:right] = filling[top:bottom, left:right]
        return mixed, max(kept, 1 - kept)

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, bottom and right, in pixels, of what is filled."""
        assert self.centre is not None
        side, sides = math.sqrt(1 - self.share), (height, width)
        middle = [int(place * num) for place, num in zip(self.centre, sides, strict=True)]
        half = [int(side * num / 2) for num in sides]
        top, left = (max(0, m - h) for m, h in zip(middle, half, strict=True))
        bottom, right = (min(num, m + h) for m, h, num in zip(middle, half, sides, strict=True))
        return top, left, bottom, right


class Mixing(NamedTuple):
    """How strongly pictures are mixed.

    Attributes:
        mixup: Shares are of Beta(mixup, mixup); 0 for none.
        cutmix: The same, of CutMix. With both, each picture draws which of the two, at even odds.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def draw(self, seed: int, epoch: int, index: int, num_images: int) -> Mix | None:
        """Return what becomes of picture `index` in `epoch`, None where nothing is mixed.

        Its partner is any other of the `num_images` of training, with the same probability.
        """
        if not self.mixup and not self.cutmix:
            return None
        rng = np.random.default_rng((MIXING, seed, epoch, index))
        partner = (index + 1 + int(rng.integers(max(1, num_images - 1)))) % num_images
        # Everything is drawn whatever is on.
        is_box, centre = rng.random() < 0.5, (float(rng.random()), float(rng.random()))
        is_box = bool(self.cutmix) and (is_box or not self.mixup)
        strength = self.cutmix if is_box else self.mixup
        return Mix(partner, float(rng.beta(strength, strength)), centre if is_box else None)
