"""Near duplicates: images of the same photograph that was copied, resized, re-encoded, mirrored or slightly cropped.

Pairs with similar hashes are candidates. Small grey copies of a candidate pair are then aligned at the best crop, and
their correlation decides. The constants were measured on 4,676 photographs of food, garments, waste, flowers and aerial
scenes, with 400 copies of each kind (the scripts are gone; `benchmarks/check` has the results for 30 of each):

- Radius. The hashes of resized, re-encoded and mirrored copies are within 4 bits, and 98 % of copies cropped to 0.95 of
  width and height within 16 bits. So are 6 of 10,000 pairs of different photographs, which the correlation must reject.
- Detail. The grey copies are compared after subtracting a blur of 1.5 pixels. Without this, grey copies of two dark
  garments on a light ground correlate by 0.95. Their detail correlates by at most 0.67, that of cropped copies by at
  least 0.76. Four pairs of the original photographs were above 0.7: all show the same object, two are a second shot.
- Crops. The aspect ratios of both images give the ratio of a crop's shares of width and height, so only the size of the
  crop is searched.
"""

# Shapes: N images, S pixels of a grey copy's side, P pairs.

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from finetune.data.checking.image_facts import Facts
from finetune.data.checking.perceptual_hash import hashes, near_pairs, nearest
from finetune.data.file_facts import UNKNOWN, equal_files
from finetune.system.machine import num_cores
from finetune.system.progress import track

RADIUS = 16  # bits
MIN_DETAIL = 0.7  # correlation
_SURE = 4  # bits: copies that were not cropped are within it
# pairs per image by its hash, and those that are correlated
_NUM_CANDIDATES = 64
_NUM_COMPARED = 4
_COPY = 0.95  # correlation above which no crop is searched
_NO_DETAIL = 0.5  # grey levels, about the rounding error: smooth gradients and plain areas
_MIN_SHAPE = 0.6  # correlation of 16 x 16 pixels without alignment; most crops are above it
_MAX_COLOUR = 16  # grey levels between mean colours
_GREY = 2  # grey levels between the channels of a mean colour
_MAX_ASPECT = 0.12  # natural logarithm of the ratio
_BLUR = 1.5  # pixels
# of a crop, of its longer kept side
_SHARES = (1.0, 0.985, 0.97, 0.955, 0.94, 0.925, 0.91, 0.895)
# grey levels
_FLAT = 2.5
_DARK = 12

Image = NDArray[np.uint8]


class Pair(NamedTuple):
    """Two images of the same photograph, i < j."""

    i: int
    j: int
    correlation: float  # of their detail, at the best alignment
    is_mirrored: bool
    share: float  # the crop's share of the other image's width or height


def is_blank(facts: Facts) -> NDArray[np.bool_]:
    """Return which images are blank, (N,): of one colour, or nearly black. All channels are considered."""
    return facts.is_readable & ((facts.contrast < _FLAT) | (facts.brightest < _DARK))


class Copies(NamedTuple):
    """The copies among N images.

    Attributes:
        exact: Sets of images whose files are equal.
        near: Pairs of other images that show the same photograph.
        distinct: Indices of the images that show something, one of each set of equal files, ascending.
    """

    exact: list[list[int]]
    near: list[Pair]
    distinct: NDArray[np.int64]

    def repeated(self) -> list[tuple[int, int]]:
        """Return each further file of a set of equal files, paired with the first."""
        return [(members[0], i) for members in self.exact for i in members[1:]]


def find_copies(facts: Facts, is_kept: NDArray[np.bool_] | bool = True) -> Copies:
    """Return the copies among the images that are readable, not blank and kept, (N,)."""
    shows_something = facts.is_readable & ~is_blank(facts) & is_kept
    exact = equal_files(np.where(shows_something, facts.digests, UNKNOWN))
    repeated = [i for members in exact for i in members[1:]]
    distinct = np.setdiff1d(np.flatnonzero(shows_something), repeated)
    return Copies(exact, near_duplicates(facts, distinct), distinct)


def near_duplicates(facts: Facts, chosen: NDArray[np.int64]) -> list[Pair]:
    """Return pairs of the chosen images that show the same photograph, enough to connect each set of duplicates."""
    grey = facts.grey[chosen]
    plain, mirrored = hashes(grey)
    shapes = _shapes(grey)
    has_detail = _has_detail(grey)
    found: list[Pair] = []
    for is_mirrored, others in ((False, plain), (True, mirrored)):
        i, j = near_pairs(plain, others, RADIUS, _NUM_CANDIDATES)
        distance = np.bitwise_count(plain[i] ^ others[j])
        keep = (distance <= _SURE) & _have_similar_hues(facts, chosen[i], chosen[j])
        keep |= _are_similar(facts, chosen[i], chosen[j])
        keep &= has_detail[i] & has_detail[j]
        i = i[keep]
        j = j[keep]
        distance = distance[keep]
        keep = _correlation(shapes, i, j, is_mirrored) > _MIN_SHAPE
        i = i[keep]
        j = j[keep]
        distance = distance[keep]
        keep = nearest(i, distance, _NUM_COMPARED)
        pairs = np.column_stack([chosen[i[keep]], chosen[j[keep]]])
        found += _confirmed_pairs(facts, pairs, is_mirrored)
    # each pair once, with its highest correlation
    best = {pair[:2]: pair for pair in sorted(found, key=lambda pair: pair.correlation)}
    return sorted(best.values())


def _has_detail(grey: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which grey copies (N, S, S) have enough detail to compare, (N,): no smooth gradients."""
    # without the border, which the blur affects
    return np.array([_detail(g)[4:-4, 4:-4].std() > _NO_DETAIL for g in grey], bool)


def _confirmed_pairs(
    facts: Facts,
    pairs: NDArray[np.int64],
    is_mirrored: bool,
) -> list[Pair]:
    """Return the pairs, of candidates (P, 2), whose detail correlates by at least `MIN_DETAIL`."""
    i = pairs[:, 0]
    j = pairs[:, 1]
    ratios = facts.aspects[j] / facts.aspects[i]
    ratios = np.where(
        (ratios > 0.8) & (ratios < 1.25), ratios, 1.0
    )  # beyond: squashed, not cropped
    others = facts.grey[:, :, ::-1] if is_mirrored else facts.grey

    def fit(p: int) -> tuple[float, float]:
        return best_fit(facts.grey[i[p]], others[j[p]], ratios[p])

    found = []
    with ThreadPoolExecutor(num_cores()) as threads:
        # In chunks, because an interruption waits for the submitted tasks.
        for first in track(
            range(0, len(i), 1024), -(-len(i) // 1024), "pairs compared pixel by pixel"
        ):
            some = range(first, min(first + 1024, len(i)))
            for p, (agrees, share) in zip(some, threads.map(fit, some), strict=True):
                if agrees >= MIN_DETAIL:
                    found.append(Pair(int(i[p]), int(j[p]), round(agrees, 3), is_mirrored, share))
    return found


def best_fit(a: Image, b: Image, ratio: float) -> tuple[float, float]:
    """Return the highest correlation of the detail of two grey copies (S, S), and the share of the crop.

    Either image may be a crop of the other.

    Args:
        a: Grey copy of one image.
        b: Grey copy of the other image.
        ratio: Aspect ratio of b's image over that of a's image.
    """
    best = (-1.0, 1.0)
    details = _detail(a), _detail(b)
    for share in _SHARES:
        for detail, part, r in ((details[0], b, ratio), (details[1], a, 1 / ratio)):
            width = share * min(1.0, r)
            height = share * min(1.0, 1 / r)
            size = round(width * part.shape[1]), round(height * part.shape[0])
            fit = cv2.matchTemplate(
                detail, _detail(cv2.resize(part, size, interpolation=cv2.INTER_AREA)), 5
            ).max()
            best = max(best, (float(fit), share))
            if share == 1 and best[0] > _COPY:
                return best
    return best


def _detail(grey: np.ndarray) -> NDArray[np.float32]:
    pixels = grey.astype(np.float32)
    return pixels - cv2.GaussianBlur(pixels, (0, 0), _BLUR)


def _shapes(grey: Image) -> NDArray[np.float32]:
    """Return each copy at 16 x 16 pixels, with a mean of 0 and a norm of 1, (N, 16, 16)."""
    num = len(grey)
    side = grey.shape[1] // 16
    small = grey.reshape(num, 16, side, 16, side).mean(axis=(2, 4), dtype=np.float32)
    small -= small.mean(axis=(1, 2), keepdims=True)
    return small / np.maximum(np.linalg.norm(small, axis=(1, 2), keepdims=True), 1e-6)


def _correlation(
    shapes: NDArray[np.float32], i: np.ndarray, j: np.ndarray, is_mirrored: bool
) -> NDArray[np.float32]:
    correlations = np.empty(len(i), np.float32)
    for first in range(0, len(i), 65536):
        some = slice(first, first + 65536)
        others = shapes[j[some]][:, :, ::-1] if is_mirrored else shapes[j[some]]
        correlations[some] = np.einsum("pxy,pxy->p", shapes[i[some]], others)
    return correlations


def _are_similar(facts: Facts, i: np.ndarray, j: np.ndarray) -> NDArray[np.bool_]:
    """Return which pairs have similar aspect ratios and mean colours, as after cropping 5 %, (P,)."""
    aspects = np.abs(np.log(facts.aspects[i] / facts.aspects[j])) < _MAX_ASPECT
    return aspects & (
        np.abs(facts.colours[i] - facts.colours[j]).max(axis=1, initial=0) < _MAX_COLOUR
    )


def _have_similar_hues(facts: Facts, i: np.ndarray, j: np.ndarray) -> NDArray[np.bool_]:
    """Return which pairs have mean colours that only differ in brightness, or have a grey image, (P,).

    All other comparisons use grey copies, in which a red and a green shirt look the same.
    """
    hues = facts.colours - facts.colours.mean(axis=1, keepdims=True)
    is_grey = np.abs(hues).max(axis=1, initial=0) < _GREY
    differences = np.abs(hues[i] - hues[j]).max(axis=1, initial=0)
    return (differences < _MAX_COLOUR) | is_grey[i] | is_grey[j]


def connected(edges: Sequence[tuple[int, int]], num: int) -> list[list[int]]:
    """Return the connected components of more than one of `num` images, each sorted."""
    if not edges:
        return []
    rows, columns = np.array(edges).T
    graph = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(num, num))
    labels = connected_components(graph, directed=False)[1]
    order = np.argsort(labels, kind="stable")
    sets = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return sorted(members.tolist() for members in sets if len(members) > 1)
