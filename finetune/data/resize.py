"""Pictures brought to size as Pillow and torchvision do it, with which the usual weights were trained, only faster.

Where pixels get fewer it is torch's antialiased bilinear kernel: within 2 of 255 grey levels of Pillow's `BILINEAR`.
OpenCV has nothing like it: its `INTER_LINEAR` makes patterns, its `INTER_AREA` averages and takes longer. Bicubic, with
which many of timm's weights were trained, is torch's antialiased kernel in both directions: it is Pillow's, with an `a`
of -0.5, where OpenCV's has -0.75.
"""

from typing import Any

import albumentations as A
import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from finetune.data.limits import MAX_PIXELS

# Worker processes are the parallelism here; OpenCV's own threads would only fight them and torch's.
cv2.setNumThreads(0)


def resize(
    picture: NDArray[np.uint8], height: int, width: int, *, is_bicubic: bool = False
) -> NDArray[np.uint8]:
    """Return the (H, W, 3) uint8 picture as (height, width, 3): the same array if that is its size already."""
    if picture.shape[:2] == (height, width):
        return picture
    # a column of pixels: torch would first make it wide, then low
    if picture.shape[0] * width > MAX_PIXELS:
        return resize(
            resize(picture, height, picture.shape[1], is_bicubic=is_bicubic),
            height,
            width,
            is_bicubic=is_bicubic,
        )
    if height >= picture.shape[0] and width >= picture.shape[1] and not is_bicubic:
        # bilinear too, and faster
        larger = cv2.resize(picture, (width, height), interpolation=cv2.INTER_LINEAR)
        return np.asarray(larger, np.uint8)
    # torch warns about arrays that are read-only, and copies a crop for its kernel anyhow. The view is channels_last,
    # which makes torch take a kernel for bytes; the other layout goes through floats.
    pixels = torch.from_numpy(np.array(picture))[None].permute(0, 3, 1, 2)
    smaller = F.interpolate(
        pixels, (height, width), mode="bicubic" if is_bicubic else "bilinear", antialias=True
    )
    return smaller[0].permute(1, 2, 0).numpy()


class RandomResizedCrop(A.RandomResizedCrop):
    """albumentations' transform with the same crops, brought to size by `resize`."""

    def apply(
        self, img: NDArray[np.uint8], crop_coords: tuple[int, int, int, int], **params: Any
    ) -> NDArray[np.uint8]:
        left, top, right, bottom = crop_coords
        return resize(
            img[top:bottom, left:right],
            *self.size,
            is_bicubic=self.interpolation == cv2.INTER_CUBIC,
        )


class Resize(A.Resize):
    """albumentations' transform, by `resize`."""

    def apply(self, img: NDArray[np.uint8], **params: Any) -> NDArray[np.uint8]:
        return resize(
            img, self.height, self.width, is_bicubic=self.interpolation == cv2.INTER_CUBIC
        )


class SmallestMaxSize(A.SmallestMaxSize):
    """albumentations' transform, by `resize`; what would get more than `MAX_PIXELS` is cut to its middle before."""

    def apply(self, img: NDArray[np.uint8], scale: float, **params: Any) -> NDArray[np.uint8]:
        height, width = (max(1, round(side * scale)) for side in img.shape[:2])
        # a line of pixels, of which the crop that follows sees a few
        if height * width > MAX_PIXELS:
            img = _middle(img, int(MAX_PIXELS / (min(height, width) * scale)) - 1)
            height, width = (max(1, round(side * scale)) for side in img.shape[:2])
        return resize(img, height, width, is_bicubic=self.interpolation == cv2.INTER_CUBIC)


def _middle(picture: NDArray[np.uint8], num: int) -> NDArray[np.uint8]:
    """Take as much from both ends of the longer side as leaves `num` pixels or one fewer."""
    top, left = (max(0, side - num + 1) // 2 for side in picture.shape[:2])
    return picture[top : picture.shape[0] - top, left : picture.shape[1] - left]
