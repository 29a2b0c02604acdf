"""TrivialAugment: one random operation at one random strength per image, without anything to tune.

The operations are Pillow's, as in the paper. Their list and their strengths are the paper's wide space, as in
torchvision's `TrivialAugmentWide`.

Source: Müller and Hutter 2021 (arXiv:2103.10158), table 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import albumentations as A
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

NUM_STEPS = 31
# In float64: torchvision's float32 fractions are slightly below some integers, so that 16 pixels become 15.
_STEPS = [step / (NUM_STEPS - 1) for step in range(NUM_STEPS)]


class Operation(NamedTuple):
    """An operation on an image.

    Attributes:
        act: Maps an image and a strength to an image of the same size.
        strengths: The strength of each step.
        is_signed: Whether the sign of the strength is random.
    """

    act: Callable[[Image.Image, float], Image.Image]
    strengths: Sequence[float] = (0.0,) * NUM_STEPS
    is_signed: bool = False


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Return an image whose pixel (x, y) comes from (a x + b y + c, d x + e y + f); black outside the image."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _strengths_up_to(strongest: float) -> list[float]:
    return [step * strongest for step in _STEPS]


OPERATIONS = {
    "Identity": Operation(lambda image, _: image),
    "ShearX": Operation(
        lambda image, s: _affine(image, 1, s, 0, 0, 1, 0), _strengths_up_to(0.99), True
    ),
    "ShearY": Operation(
        lambda image, s: _affine(image, 1, 0, 0, s, 1, 0), _strengths_up_to(0.99), True
    ),
    # pixels
    "TranslateX": Operation(
        lambda image, s: _affine(image, 1, 0, -int(s), 0, 1, 0), _strengths_up_to(32), True
    ),
    "TranslateY": Operation(
        lambda image, s: _affine(image, 1, 0, 0, 0, 1, -int(s)), _strengths_up_to(32), True
    ),
    "Rotate": Operation(lambda image, s: image.rotate(s), _strengths_up_to(135), True),  # degrees
    "Brightness": Operation(
        lambda image, s: ImageEnhance.Brightness(image).enhance(1 + s),
        _strengths_up_to(0.99),
        True,
    ),
    "Color": Operation(
        lambda image, s: ImageEnhance.Color(image).enhance(1 + s), _strengths_up_to(0.99), True
    ),
    "Contrast": Operation(
        lambda image, s: ImageEnhance.Contrast(image).enhance(1 + s),
        _strengths_up_to(0.99),
        True,
    ),
    "Sharpness": Operation(
        lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + s),
        _strengths_up_to(0.99),
        True,
    ),
    "Posterize": Operation(  # to 8 … 2 bits
        lambda image, s: ImageOps.posterize(image, int(s)),
        [round(8 - 6 * step) for step in _STEPS],
    ),
    "Solarize": Operation(lambda image, s: ImageOps.solarize(image, 255 * s), _STEPS[::-1]),  # type: ignore[arg-type]
    "AutoContrast": Operation(lambda image, _: ImageOps.autocontrast(image)),
    "Equalize": Operation(lambda image, _: ImageOps.equalize(image)),
}
_NAMES = list(OPERATIONS)


class TrivialAugment(A.ImageOnlyTransform):
    """Applies one of 14 operations at one of 31 strengths, both drawn uniformly.

    Args:
        p: Probability of applying the transform.
    """

    def __init__(self, p: float = 1.0) -> None:
        super().__init__(p=p)

    def get_params(self) -> dict[str, Any]:
        name = self.py_random.choice(_NAMES)
        strength = self.py_random.choice(OPERATIONS[name].strengths)
        is_negative = self.py_random.random() < 0.5
        return {
            "operation": name,
            "strength": -strength if is_negative and OPERATIONS[name].is_signed else strength,
        }

    def apply(
        self, img: NDArray[np.uint8], operation: str, strength: float, **params: Any
    ) -> NDArray[np.uint8]:
        # A copy, because Pillow's array is read-only and the next transform may write to it.
        return np.array(OPERATIONS[operation].act(Image.fromarray(img), strength))
