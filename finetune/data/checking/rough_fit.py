"""A fast correlation of thousands of pairs of images, which rejects most pairs before `duplicates.best_fit`.

It computes the same as `duplicates.best_fit` on copies of half the side: the correlation of detail at all positions. It
uses Fourier transforms of many pairs at once, and prepares each image once. 22,000 pairs of photographs take 3.4 CPU
seconds, and 17 with one call per pair. It uses one thread, because scipy would start new threads in every forked
process, and these would receive signals that a worker has blocked.
"""

# Shapes: N images, P pairs, n images at once, p pairs at once, h x w pixels of a part.

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft2, rfft2

from finetune.system.progress import track

SIDE = 24  # pixels
_AT_ONCE = 8192  # pairs
_STEP = 0.04  # of the ratio's logarithm: one pixel of the side
_NOTHING = 1e-3  # grey levels: an image with less detail matches nothing

Floats = NDArray[np.float32]


def rough_fits(
    grey: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    pairs: NDArray[np.int64],
    ratios: NDArray[np.floating],
    shares: tuple[float, ...],
    blur: float,
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the highest correlation of each pair's detail, (P,), and the index of its share, (P,).

    Args:
        grey: The grey copies of first and of second images, (N, S, S) each; S is a multiple of `SIDE`.
        pairs: First and second image of each pair, (P, 2).
        ratios: Aspect ratio of the second image over that of the first, (P,).
        shares: Shares of a crop, as in `best_fit`.
        blur: Standard deviation of the blur that is subtracted, in pixels.
    """
    num_pairs = len(pairs)
    fits = np.full(num_pairs, -1, np.float32)
    which = np.zeros(num_pairs, np.int64)
    steps = np.round(np.log(ratios) / _STEP).astype(np.int64)
    for first in track(
        range(0, num_pairs, _AT_ONCE), -(-num_pairs // _AT_ONCE), "candidates for crops compared"
    ):
        for step in np.unique(steps[first : first + _AT_ONCE]):
            some = first + np.flatnonzero(steps[first : first + _AT_ONCE] == step)
            unique_images = [np.unique(side[some], return_inverse=True) for side in pairs.T]
            copies = [
                _small(images[chosen])
                for images, (chosen, _) in zip(grey, unique_images, strict=True)
            ]
            places = [place for _, place in unique_images]
            for whole, part, ratio in ((0, 1, np.exp(step * _STEP)), (1, 0, np.exp(-step * _STEP))):
                pixels = _detail(copies[whole], SIDE, SIDE, blur)
                spectrum = rfft2(pixels)
                for k, share in enumerate(shares):
                    width, height = (round(share * min(1.0, r) * SIDE) for r in (ratio, 1 / ratio))
                    found = _correlations(
                        pixels,
                        spectrum,
                        _detail(copies[part], height, width, blur),
                        places[whole],
                        places[part],
                    )
                    better = some[found > fits[some]]
                    fits[some] = np.maximum(found, fits[some])
                    which[better] = k
    return fits, which


def _correlations(
    pixels: Floats,
    spectrum: NDArray[np.complex64],
    parts: Floats,
    wholes_of: np.ndarray,
    parts_of: np.ndarray,
) -> Floats:
    """Return the highest normalised correlation of each pair's part (n, h, w) with the pixels (n, S, S), (p,)."""
    height, width = parts.shape[1:]
    num = height * width
    parts = parts - parts.mean(axis=(1, 2), keepdims=True)
    norms = np.sqrt((parts**2).sum(axis=(1, 2), keepdims=True))
    parts = np.where(norms > _NOTHING, parts / np.maximum(norms, _NOTHING), 0)
    conjugate = rfft2(parts, s=pixels.shape[1:]).conj()
    below = _windows(pixels**2, height, width) - _windows(pixels, height, width) ** 2 / num
    # Only the first positions of each axis, at which the part lies inside and does not wrap around.
    laid = irfft2(spectrum[wholes_of] * conjugate[parts_of], s=pixels.shape[1:])
    laid = laid[:, : SIDE - height + 1, : SIDE - width + 1]
    scale = np.sqrt(np.maximum(below, _NOTHING))[wholes_of]
    return np.asarray((laid / scale).max(axis=(1, 2)), np.float32)


def _windows(values: Floats, height: int, width: int) -> Floats:
    """Return the sum over each window of h x w, (n, S - h + 1, S - w + 1)."""
    down, across = (
        np.tri(SIDE - k + 1, SIDE, k - 1) - np.tri(SIDE - k + 1, SIDE, -1) for k in (height, width)
    )
    return np.asarray(down.astype(np.float32) @ values @ across.T.astype(np.float32))


def _small(grey: NDArray[np.uint8]) -> Floats:
    num = len(grey)
    size = grey.shape[1] // SIDE
    return np.asarray(grey.reshape(num, SIDE, size, SIDE, size).mean(axis=(2, 4), dtype=np.float32))


def _detail(copies: Floats, height: int, width: int, blur: float) -> Floats:
    """Return copies (n, S, S) resized and with their blur subtracted, (n, h, w)."""
    down, blurred_down = _to_size(height, blur)
    across, blurred_across = _to_size(width, blur)
    return np.asarray(down @ copies @ across.T - blurred_down @ copies @ blurred_across.T)


def _to_size(size: int, blur: float) -> tuple[Floats, Floats]:
    """Return the matrices (size, S) that resize a side as OpenCV does, without and with blur."""
    identity = np.eye(SIDE, dtype=np.float32)
    sharp = (
        cv2.resize(identity, (SIDE, size), interpolation=cv2.INTER_AREA)
        if size < SIDE
        else identity
    )
    kernel = cv2.getGaussianKernel(round(8 * blur + 1) | 1, blur, cv2.CV_32F)
    return np.asarray(sharp), np.asarray(
        cv2.sepFilter2D(sharp, -1, np.ones((1, 1), np.float32), kernel)
    )
