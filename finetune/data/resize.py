"""Resizing as in Pillow and torchvision, with which most pretrained weights were trained, but faster.

Downscaling uses torch's antialiased bilinear kernel, which is within 2 of 255 grey levels of Pillow's `BILINEAR`.
OpenCV has no equivalent: its `INTER_LINEAR` aliases, and its `INTER_AREA` averages and is slower.

Bicubic resizing, with which many of timm's weights were trained, uses torch's antialiased kernel up and down. It is
Pillow's kernel with `a` = -0.5; OpenCV's has -0.75.
"""

from typing import Any

import albumentations as A
import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from finetune.data.limits import MAX_PIXELS
from finetune.settings.schema import Interpolation, ResizeMode

# The mean colour of ImageNet, which is about 0 after normalisation. It is the same for all networks, so that the
# preparation of images does not depend on the network. timm pads with this colour, too (`crop_mode: border`).
PADDING = (124, 116, 104)

# Workers already run in parallel. OpenCV's threads would compete with them and with torch's.
cv2.setNumThreads(0)


def resize(
    image: NDArray[np.uint8], height: int, width: int, *, is_bicubic: bool = False
) -> NDArray[np.uint8]:
    """Resize an image (H, W, 3) uint8 to (height, width, 3). The result may be written to."""
    if image.shape[:2] == (height, width):
        return image if image.flags.writeable else image.copy()
    # torch resizes the width first, which would make a tall narrow image very large: resize the height first
    if image.shape[0] * width > MAX_PIXELS:
        return resize(
            resize(image, height, image.shape[1], is_bicubic=is_bicubic),
            height,
            width,
            is_bicubic=is_bicubic,
        )
    if height >= image.shape[0] and width >= image.shape[1] and not is_bicubic:
        # Upscaling: also bilinear, and faster.
        larger = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        return np.asarray(larger, np.uint8)
    # A copy, because torch warns about read-only arrays, and its kernel copies a crop anyway. The view is
    # channels_last, for which torch has a uint8 kernel; the other layout is converted to float.
    pixels = torch.from_numpy(np.array(image))[None].permute(0, 3, 1, 2)
    smaller = F.interpolate(
        pixels, (height, width), mode="bicubic" if is_bicubic else "bilinear", antialias=True
    )
    return smaller[0].permute(1, 2, 0).numpy()


class RandomResizedCrop(A.RandomResizedCrop):
    """albumentations' transform with the same crops, resized by `resize`."""

    def apply(
        self, img: NDArray[np.uint8], crop_coords: tuple[int, int, int, int], **params: Any
    ) -> NDArray[np.uint8]:
        left, top, right, bottom = crop_coords
        return resize(
            img[top:bottom, left:right],
            *self.size,
            is_bicubic=self.interpolation == cv2.INTER_CUBIC,
        )


class Prepare(A.ImageOnlyTransform):
    """The preparation of evaluation: an image (H, W, 3) to (size, size, 3).

    Args:
        size: Side of the result in pixels.
        mode: How the image is resized, see `transforms.eval_transform`.
        interpolation: Kernel for resizing.
        side: Side in pixels to which the image is resized before the centre is cropped; not for `whole` and `pad`.
    """

    def __init__(
        self, size: int, mode: ResizeMode, interpolation: Interpolation, side: int = 0
    ) -> None:
        super().__init__(p=1.0)
        self.size = size
        self.mode = mode
        self.is_bicubic = interpolation == "bicubic"
        self.side = side

    def apply(self, img: NDArray[np.uint8], **params: Any) -> NDArray[np.uint8]:
        size = self.size
        if self.mode == "whole":
            return self._resize(img, size, size)
        if self.mode == "squash":
            return _centre(self._resize(img, self.side, self.side), size, size)
        if self.mode == "pad":
            inside = self._scale(img, size / max(img.shape[:2]))
            top, left = ((size - num) // 2 for num in inside.shape[:2])
            result = np.full((size, size, 3), PADDING, np.uint8)
            result[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
            return result
        scale = self.side / min(img.shape[:2])
        longer = max(img.shape[:2])
        if longer * scale * self.side > MAX_PIXELS:  # only the middle of such a long image is kept
            num = int(MAX_PIXELS / (self.side * scale)) - 1
            num -= (longer - num) % 2  # or the middle would move by half a pixel
            img = _centre(img, num, num)
        return _centre(self._scale(img, scale), size, size)

    def _scale(self, image: NDArray[np.uint8], scale: float) -> NDArray[np.uint8]:
        height, width = (max(1, round(num * scale)) for num in image.shape[:2])
        return self._resize(image, height, width)

    def _resize(self, image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
        return resize(image, height, width, is_bicubic=self.is_bicubic)


def _centre(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Crop the centre of an image to a height and width, if it is larger."""
    top = max(0, image.shape[0] - height) // 2
    left = max(0, image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]
