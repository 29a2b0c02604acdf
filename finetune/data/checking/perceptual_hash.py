"""Perceptual hashes of 64 bits, and all pairs of images whose hashes are near.

Each bit says whether one of the 8 x 8 lowest frequencies (DCT) of the small grey copy is above their median. On an
image of 32 x 32 pixels the bits are those of `imagehash.phash`. The mirror image has the same frequencies, with the
sign of odd horizontal ones changed.

Source: pHash; Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions, 2010.
"""

# Shapes: N images.

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from finetune.system.machine import num_cores
from finetune.system.progress import track

Hashes = NDArray[np.uint64]
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]

# of a block, which fits a core's cache
_ROWS = 32
_COLUMNS = 4096


def hashes(grey: NDArray[np.uint8]) -> tuple[Hashes, Hashes]:
    """Return the hashes of grey copies (N, S, S) and of their mirror images, (N,) each."""
    frequencies = np.arange(8)
    places = 2 * np.arange(grey.shape[1]) + 1
    # (8, S)
    cosines = np.cos(np.pi * frequencies[:, None] * places / (2 * grey.shape[1])).astype(np.float32)
    found = []
    for first in range(0, len(grey), 4096):
        low = cosines @ grey[first : first + 4096].astype(np.float32) @ cosines.T  # (n, 8, 8)
        mirrored = low * (1 - 2 * (frequencies % 2))
        found.append((_bits(low), _bits(mirrored)))
    if not found:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])


def _bits(low: NDArray[np.float32]) -> Hashes:
    flat = low.reshape(len(low), 64)
    return (
        np.packbits(flat > np.median(flat, axis=1, keepdims=True), axis=1)
        .view(">u8")[:, 0]
        .astype(np.uint64)
    )


def near_pairs(left: Hashes, right: Hashes, radius: int, most: int) -> Pairs:
    """Return sorted pairs i < j with left[i] and right[j] at most `radius` bits apart, the `most` nearest of each i.

    All pairs are compared, in blocks over all cores. The limit `most` avoids N**2 pairs of similar images; a few of
    each image suffice to connect a set.
    """
    with ThreadPoolExecutor(num_cores()) as threads:
        rows = range(0, len(left), _ROWS)
        found = threads.map(lambda i: _of_rows(left, right, radius, most, i), rows)
        pairs = list(track(found, len(rows), "images compared"))
    if not pairs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    i, j = (np.concatenate(side) for side in zip(*pairs, strict=True))
    order = np.lexsort([j, i])
    return i[order], j[order]


def nearest(i: NDArray[np.int64], distance: NDArray[np.integer], most: int) -> NDArray[np.int64]:
    """Return the sorted indices of pairs that are among the `most` nearest of their i; on ties the first ones."""
    if not len(i) or np.bincount(i - i.min()).max() <= most:
        return np.arange(len(i))
    key = (i - i.min()) * 65 + distance  # 64 bits at most
    # sorting uint16 is much faster
    order = np.argsort(key.astype(np.uint16) if key.max() < 2**16 else key, kind="stable")
    rank = np.arange(len(i)) - np.searchsorted(i[order], i[order])
    return np.sort(order[rank < most])


def _of_rows(left: Hashes, right: Hashes, radius: int, most: int, first: int) -> Pairs:
    rows = left[first : first + _ROWS, None]
    difference = np.empty((len(rows), _COLUMNS), np.uint64)
    distance = np.empty((len(rows), _COLUMNS), np.uint8)
    found: list[Pairs] = []
    for start in range(first, len(right), _COLUMNS):
        columns = right[None, start : start + _COLUMNS]
        num = columns.shape[1]
        np.bitwise_xor(rows, columns, out=difference[:, :num])
        np.bitwise_count(difference[:, :num], out=distance[:, :num])
        flat = np.flatnonzero(distance[:, :num] <= radius)
        found.append(_nearest_later(left, right, most, first + flat // num, start + flat % num))
    i, j = (np.concatenate(side) for side in zip(*found, strict=True))
    return _nearest_later(left, right, most, i, j)


def _nearest_later(
    left: Hashes, right: Hashes, most: int, i: NDArray[np.int64], j: NDArray[np.int64]
) -> Pairs:
    is_later = i < j
    i = i[is_later]
    j = j[is_later]
    keep = nearest(i, np.bitwise_count(left[i] ^ right[j]), most)
    return i[keep], j[keep]
