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

# The mean colour of ImageNet, which is about 0 after normalisation. It is the same for all networks, so that the
# preparation of images does not depend on the network. timm pads with this colour, too (`crop_mode: border`).
PADDING = (124, 116, 104)

# Workers already run in parallel. OpenCV's threads would compete with them and with torch's.
cv2.setNumThreads(0)


def resize(
    image: NDArray[np.uint8], height: int, width: int, *, is_bicubic: bool = False
) -> NDArray[np.uint8]:
    """Resize an image (H, W, 3) uint8 to (height, width, 3). Returns the same array if it already has this size."""
    if image.shape[:2] == (height, width):
        return image
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


class Pad(A.ImageOnlyTransform):
    """Resizes an image to fit into a square, centres it, and fills the rest with `PADDING`.

    Args:
        size: Side of the square in pixels.
        interpolation: Kernel for resizing, as in OpenCV.
    """

    def __init__(self, size: int, interpolation: int = cv2.INTER_LINEAR) -> None:
        super().__init__(p=1.0)
        self.size = size
        self.interpolation = interpolation

    def apply(self, img: NDArray[np.uint8], **params: Any) -> NDArray[np.uint8]:
        scale = self.size / max(img.shape[:2])
        height = max(1, round(img.shape[0] * scale))
        width = max(1, round(img.shape[1] * scale))
        top = (self.size - height) // 2
        left = (self.size - width) // 2
        result = np.full((self.size, self.size, 3), PADDING, np.uint8)
        is_bicubic = self.interpolation == cv2.INTER_CUBIC
        result[top : top + height, left : left + width] = resize(
            img, height, width, is_bicubic=is_bicubic
        )
        return result


class Resize(A.Resize):
    """albumentations' transform, resized by `resize`."""

    def apply(self, img: NDArray[np.uint8], **params: Any) -> NDArray[np.uint8]:
        return resize(
            img, self.height, self.width, is_bicubic=self.interpolation == cv2.INTER_CUBIC
        )


class SmallestMaxSize(A.SmallestMaxSize):
    """albumentations' transform, resized by `resize`. If the result would exceed `MAX_PIXELS`, it is cropped before."""

    def apply(self, img: NDArray[np.uint8], scale: float, **params: Any) -> NDArray[np.uint8]:
        height, width = (max(1, round(side * scale)) for side in img.shape[:2])
        # a very long image: the centre crop that follows only keeps a small part of it
        if height * width > MAX_PIXELS:
            img = _middle(img, int(MAX_PIXELS / (min(height, width) * scale)) - 1)
            height, width = (max(1, round(side * scale)) for side in img.shape[:2])
        return resize(img, height, width, is_bicubic=self.interpolation == cv2.INTER_CUBIC)


def _middle(image: NDArray[np.uint8], num: int) -> NDArray[np.uint8]:
    """Crop the longer side to its central `num` or `num - 1` pixels."""
    top, left = (max(0, side - num + 1) // 2 for side in image.shape[:2])
    return image[top : image.shape[0] - top, left : image.shape[1] - left]
