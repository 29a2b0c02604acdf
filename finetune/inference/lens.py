"""Images as a checkpoint's network sees them, and heat maps of a class in them."""

from collections.abc import Sequence

import cv2
import numpy as np

from finetune.data.decode import DecodeError, decode
from finetune.inference.class_activation import why_not_shown
from finetune.inference.predictor import Predictor
from finetune.runs.highlights import Lens

# Shapes: h and w pixels, u x v places of a network's last maps.

_AT_ONCE = 16


def lens(predictor: Predictor) -> Lens:
    """Return how a model sees images, and where in them its evidence lies."""

    def see(path: str, side: int) -> np.ndarray | None:
        try:
            picture = decode(path, shorter_side=2 * side)
        except (OSError, DecodeError):
            return None
        return predictor.prepare(picture, side)

    def overlay(paths: Sequence[str], classes: Sequence[int], side: int) -> list[np.ndarray] | str:
        found: list[np.ndarray] = []
        for start in range(0, len(paths), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            pictures = [predictor.prepare(decode(path)) for path in paths[some]]
            maps = predictor.activation(np.stack(pictures), classes[some])
            reason = why_not_shown(maps)
            if maps is None or reason:
                return reason
            found += [
                overlaid(cv2.resize(p, (side, side)), m)
                for p, m in zip(pictures, maps, strict=True)
            ]
        return found

    return Lens(see, overlay)


def overlaid(picture: np.ndarray, spoken: np.ndarray) -> np.ndarray:
    """Return a picture (h, h, 3) uint8 in grey, and in colour where `spoken` (u, v) in [0, 1] is high."""
    side = picture.shape[0]
    share = cv2.resize(spoken.astype(np.float32), (side, side), interpolation=cv2.INTER_CUBIC).clip(
        0, 1
    )
    heat = cv2.cvtColor(
        cv2.applyColorMap((255 * share).astype(np.uint8), cv2.COLORMAP_INFERNO), cv2.COLOR_BGR2RGB
    )
    grey = np.repeat(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)[:, :, None], 3, axis=2)
    weight = 0.65 * share[:, :, None]
    return (grey * (1 - weight) + heat * weight).astype(np.uint8)
