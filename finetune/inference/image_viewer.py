"""Loads images for reports: prepared as for the network, with or without a class activation map over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from finetune.data.decode import DecodeError, decode
from finetune.inference.class_activation import why_not_shown
from finetune.inference.predictor import Predictor

# Shapes: h and w pixels, u x v positions of a network's last feature maps.

_BATCH_SIZE = 16


@dataclass(frozen=True)
class ImageViewer:
    """Functions with which a page loads images and heat maps.

    Attributes:
        see: Returns the image of a path, prepared as for the network, (h, w, 3) uint8, with a width in pixels; None if
            it cannot be read.
        overlay: Returns a heat map (h, w, 3) uint8 for each image and its class, with a width in pixels; or a sentence
            with the reason why there are no heat maps.
    """

    see: Callable[[str, int], np.ndarray | None]
    overlay: Callable[[Sequence[str], Sequence[int], int], list[np.ndarray] | str]


def image_viewer(predictor: Predictor) -> ImageViewer:
    """Return functions that prepare an image as for a checkpoint's network, and draw its class activation maps."""

    def see(path: str, side: int) -> np.ndarray | None:
        try:
            image = decode(path, shorter_side=2 * side)
        except (OSError, DecodeError):
            return None
        return predictor.prepare(image, side)

    def overlay(paths: Sequence[str], classes: Sequence[int], side: int) -> list[np.ndarray] | str:
        overlays: list[np.ndarray] = []
        for start in range(0, len(paths), _BATCH_SIZE):
            batch = slice(start, start + _BATCH_SIZE)
            images = [predictor.prepare(decode(path)) for path in paths[batch]]
            maps = predictor.activation(np.stack(images), classes[batch])
            reason = why_not_shown(maps)
            if maps is None or reason:
                return reason
            overlays += [
                overlay_heat_map(cv2.resize(image, (side, side)), heat)
                for image, heat in zip(images, maps, strict=True)
            ]
        return overlays

    return ImageViewer(see, overlay)


def overlay_heat_map(image: np.ndarray, activation: np.ndarray) -> np.ndarray:
    """Return an image (h, h, 3) uint8 in grey, with `activation` (u, v) in [0, 1] over it as a heat map."""
    side = image.shape[0]
    resized = cv2.resize(activation.astype(np.float32), (side, side), interpolation=cv2.INTER_CUBIC)
    share = resized.clip(0, 1)
    heat = cv2.cvtColor(
        cv2.applyColorMap((255 * share).astype(np.uint8), cv2.COLORMAP_INFERNO), cv2.COLOR_BGR2RGB
    )
    grey = np.repeat(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None], 3, axis=2)
    weight = 0.65 * share[:, :, None]
    return (grey * (1 - weight) + heat * weight).astype(np.uint8)
