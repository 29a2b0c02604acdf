"""Copies: equal files, and images of one photograph that were resized, re-encoded, mirrored or slightly cropped.

Pairs with similar perceptual hashes are candidates. Small grey copies of a candidate pair are then aligned at the best
crop, and their correlation decides. The constants were measured on 4,676 photographs of food, garments, waste, flowers
and aerial scenes, with 400 copies of each kind:

- Radius. The hashes of resized, re-encoded and mirrored copies are within 4 bits, and 98 % of copies cropped to 0.95 of
  width and height within 16 bits. So are 6 of 10,000 pairs of different photographs, which the correlation must reject.
- Detail. The grey copies are compared after subtracting a blur of 1.5 pixels. Without this, grey copies of two dark
  garments on a light ground correlate by 0.95. Their detail correlates by at most 0.67, that of cropped copies by at
  least 0.76. Four pairs of the original photographs were above 0.7: all show the same object, two are a second shot.
- Crops. The aspect ratios of both images give the ratio of a crop's shares of width and height, so only the size of the
  crop is searched.

Each of the 64 bits of a hash says whether one of the 8 x 8 lowest frequencies (DCT) of the grey copy is above their
median. On an image of 32 x 32 pixels the bits are those of `imagehash.phash`.

Source of the hash: pHash; Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions, 2010.
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

from finetune.data.checking.findings import Finding, Level, Row
from finetune.data.checking.image_facts import Facts
from finetune.data.data_set import DataSet
from finetune.data.file_facts import UNKNOWN, equal_files
from finetune.system.machine import num_cores
from finetune.system.messages import counted
from finetune.system.progress import track

RADIUS = 16  # bits
MIN_DETAIL = 0.7  # correlation
_SURE = 4  # bits: copies that were not cropped are within it
# pairs per image by its hash, and those that are correlated
_NUM_CANDIDATES = 64
_NUM_COMPARED = 4
_ROWS = 8  # hashes that are compared with all others at a time
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
Hashes = NDArray[np.uint64]


class Pair(NamedTuple):
    """Two images of the same photograph, i < j."""

    i: int
    j: int
    correlation: float  # of their detail, at the best alignment
    is_mirrored: bool
    share: float  # the crop's share of the other image's width or height


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


def is_blank(facts: Facts) -> NDArray[np.bool_]:
    """Return which images are blank, (N,): of one colour, or nearly black. All channels are considered."""
    return facts.is_readable & ((facts.contrast < _FLAT) | (facts.brightest < _DARK))


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
    # without the border, which the blur affects; smooth gradients cannot be compared
    has_detail = np.array([_detail(g)[4:-4, 4:-4].std() > _NO_DETAIL for g in grey], bool)
    best: dict[tuple[int, int], Pair] = {}
    for is_mirrored, others in ((False, plain), (True, mirrored)):
        pairs = near_pairs(plain, others, RADIUS, _NUM_CANDIDATES)
        pairs = pairs[has_detail[pairs].all(axis=1)]
        distance = np.bitwise_count(plain[pairs[:, 0]] ^ others[pairs[:, 1]])
        i, j = chosen[pairs].T
        is_near = (distance <= _SURE) & _have_similar_hues(facts, i, j)
        is_near |= _are_similar(facts, i, j)
        is_near &= _correlation(shapes, pairs, is_mirrored) > _MIN_SHAPE
        pairs = pairs[is_near]
        nearest = _nearest(pairs[:, 0], distance[is_near], _NUM_COMPARED)
        for pair in _confirmed_pairs(facts, chosen[pairs[nearest]], is_mirrored):
            known = best.setdefault(pair[:2], pair)
            if pair.correlation > known.correlation:
                best[pair[:2]] = pair
    return sorted(best.values())


def hashes(grey: Image) -> tuple[Hashes, Hashes]:
    """Return the hashes of grey copies (N, S, S) and of their mirror images, (N,) each."""
    frequencies = np.arange(8)
    places = 2 * np.arange(grey.shape[1]) + 1
    # (8, S)
    cosines = np.cos(np.pi * frequencies[:, None] * places / (2 * grey.shape[1])).astype(np.float32)
    plain = np.zeros(len(grey), np.uint64)
    mirrored = np.zeros(len(grey), np.uint64)
    for first in range(0, len(grey), 4096):
        some = slice(first, first + 4096)
        low = cosines @ grey[some].astype(np.float32) @ cosines.T  # (n, 8, 8)
        plain[some] = _bits(low)
        # the mirror image has the same frequencies, with the sign of odd horizontal ones changed
        mirrored[some] = _bits(low * (1 - 2 * (frequencies % 2)))
    return plain, mirrored


def _bits(low: NDArray[np.float32]) -> Hashes:
    flat = low.reshape(len(low), 64)
    bits = flat > np.median(flat, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def near_pairs(left: Hashes, right: Hashes, radius: int, most: int) -> NDArray[np.int64]:
    """Return pairs i < j with left[i] and right[j] at most `radius` bits apart, (P, 2), sorted.

    All pairs are compared, over all cores. The `most` nearest of each i are returned: a few of each image suffice to
    connect a set, and N similar images would have N**2 pairs.
    """

    def of_rows(first: int) -> NDArray[np.int64]:
        rows = left[first : first + _ROWS]
        distance = np.bitwise_count(rows[:, None] ^ right[None, first:])
        i, j = np.nonzero(distance <= radius)
        pairs = np.column_stack([i, j])[i < j]
        nearest = _nearest(pairs[:, 0], distance[pairs[:, 0], pairs[:, 1]], most)
        return pairs[nearest] + first

    starts = range(0, len(left), _ROWS)
    with ThreadPoolExecutor(num_cores()) as threads:
        found = [*track(threads.map(of_rows, starts), len(starts), "images compared")]
    return np.concatenate([np.zeros((0, 2), np.int64), *found])


def _nearest(i: NDArray[np.int64], distance: NDArray[np.integer], most: int) -> NDArray[np.int64]:
    """Return the sorted indices of pairs that are among the `most` nearest of their i; on ties the first ones."""
    order = np.lexsort([distance, i])
    rank = np.arange(len(i)) - np.searchsorted(i[order], i[order])
    return np.sort(order[rank < most])


def _confirmed_pairs(facts: Facts, pairs: NDArray[np.int64], is_mirrored: bool) -> list[Pair]:
    """Return the pairs, of candidates (P, 2), whose detail correlates by at least `MIN_DETAIL`."""
    i, j = pairs.T
    ratios = facts.aspects[j] / facts.aspects[i]
    is_cropped = (ratios > 0.8) & (ratios < 1.25)  # beyond: squashed
    ratios = np.where(is_cropped, ratios, 1.0)
    others = facts.grey[:, :, ::-1] if is_mirrored else facts.grey

    def fit(p: int) -> tuple[float, float]:
        return best_fit(facts.grey[i[p]], others[j[p]], ratios[p])

    found = []
    num_chunks = -(-len(pairs) // 1024)
    with ThreadPoolExecutor(num_cores()) as threads:
        # In chunks, because an interruption waits for the submitted tasks.
        for chunk in track(range(num_chunks), num_chunks, "pairs compared pixel by pixel"):
            some = range(1024 * chunk, min(1024 * (chunk + 1), len(pairs)))
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
            smaller = _detail(cv2.resize(part, size, interpolation=cv2.INTER_AREA))
            fit = cv2.matchTemplate(detail, smaller, cv2.TM_CCOEFF_NORMED).max()
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
    shapes: NDArray[np.float32], pairs: NDArray[np.int64], is_mirrored: bool
) -> NDArray[np.float32]:
    correlations = np.empty(len(pairs), np.float32)
    for first in range(0, len(pairs), 65536):
        i, j = pairs[first : first + 65536].T
        others = shapes[j][:, :, ::-1] if is_mirrored else shapes[j]
        correlations[first : first + 65536] = np.einsum("pxy,pxy->p", shapes[i], others)
    return correlations


def _are_similar(facts: Facts, i: np.ndarray, j: np.ndarray) -> NDArray[np.bool_]:
    """Return which pairs have similar aspect ratios and mean colours, as after cropping 5 %, (P,)."""
    aspects = np.abs(np.log(facts.aspects[i] / facts.aspects[j]))
    colours = np.abs(facts.colours[i] - facts.colours[j]).max(axis=1, initial=0)
    return (aspects < _MAX_ASPECT) & (colours < _MAX_COLOUR)


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


class _Place(NamedTuple):
    """What a finding says about copies in a place."""

    level: Level
    where: str
    advice: str


_PLACES = {
    "leak": _Place(
        "bad",
        "in more than one split",
        "Images that were seen in training make test results too good. Keep each set in one split.",
    ),
    "two_classes": _Place(
        "bad",
        "in more than one class",
        "At least one of the labels is wrong, or the image shows both. Keep it in one class, or in none.",
    ),
    "copies": _Place(
        "note",
        "in one class",
        "Each copy counts as a separate image, in training and in a validation split taken from it. "
        "One of each is enough.",
    ),
}


def duplicate_findings(
    data: DataSet, exact: Sequence[Sequence[int]], near: Sequence[Pair]
) -> list[Finding]:
    """Return the findings about copies: in several splits, in several classes, or in one class.

    Args:
        data: The data set.
        exact: Sets of equal files.
        near: Pairs of images of the same photograph. The first file of an exact set represents all of it.
    """
    rows: dict[tuple[str, str], list[Row]] = {}

    def add(kind: str, members: list[int], about: str, value: float) -> None:
        note = about + _describe_places(data, members)
        rows.setdefault((_place_of(data, members), kind), []).append(Row(members, note, value))

    for members in exact:
        add("exact", [*members], "", len(members))
    equals = {members[0]: members for members in exact}
    best: dict[int, Pair] = {}
    for pair in near:
        for i in pair[:2]:
            best[i] = max(best.get(i, pair), pair, key=lambda p: p.correlation)
    for joined in connected([pair[:2] for pair in near], len(data)):
        pair = max((best[i] for i in joined), key=lambda p: p.correlation)
        about = f"similarity {pair.correlation:.2f}"
        about += ", mirrored" if pair.is_mirrored else ""
        about += f", cropped to {pair.share:.2f}" if pair.share < 0.98 else ""
        members = sorted(i for first in joined for i in equals.get(first, [first]))
        add("near", members, f"{about}; ", pair.correlation)
    findings = []
    for (name, kind), of_kind in sorted(rows.items()):
        place = _PLACES[name]
        what = "identical files" if kind == "exact" else "near duplicates"
        title = f"{counted(len(of_kind), 'set')} of {what} {place.where}"
        of_kind.sort(key=lambda row: -row.value)
        findings.append(Finding(f"{name}_{kind}", place.level, title, place.advice, of_kind))
    return findings


def _place_of(data: DataSet, members: Sequence[int]) -> str:
    if len(np.unique(data.split_of[members])) > 1:
        return "leak"
    return "two_classes" if len(np.unique(data.set_of[members])) > 1 else "copies"


def _describe_places(data: DataSet, members: Sequence[int]) -> str:
    splits = dict.fromkeys(map(data.split_name, members))
    classes = dict.fromkeys(data.set_names[data.set_of[i]] for i in members)
    text = " and ".join(classes)
    return text if list(splits) == ["all"] else f"{text} in {' and '.join(splits)}"
