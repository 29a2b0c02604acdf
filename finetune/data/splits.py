"""The random splits: an image's split depends on its own name or its group, so other images do not move it."""

import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from finetune.system.file_names import composed

# The names of splits, in lower case: case does not matter.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


_KIND = b"finetune split"  # at most 16 bytes; separates these hashes from other uses of the seed
# 2**64 / golden ratio: its multiples are spread evenly over [0, 2**64) (Knuth, Art of Computer Programming, 6.4).
_GOLDEN = 0x9E3779B97F4A7C15


def data_set_name(place: str) -> str:
    """Return the name of a data set by its folder; by the one above if it is `train`, as in `flowers/train`."""
    folder = Path(os.path.abspath(place))
    is_part = SPLIT_NAMES.get(folder.name.lower()) == "train"
    return (folder.parent if is_part else folder).name


def hashes(names: Iterable[str], seed: int | None = None) -> np.ndarray:
    """Return a 64-bit hash of each name, (N,) uint64. It depends only on the name and the seed.

    If a name ends in a number, as `cat/0017.jpg`, the hash is that of the rest plus the number times 2**64 / golden
    ratio. So the hashes of numbered images are evenly spaced, and all others are random. Names that differ only in
    Unicode composition have the same hash, because a copy of a folder on macOS may spell é as two characters.
    """
    bases = array("Q")
    numbers = array("Q")
    last = None
    base = 0
    key = b"" if seed is None else str(seed).encode()
    for name in map(composed, names):
        stem, dot, suffix = name.rpartition(".")
        if not dot:
            stem, suffix = suffix, stem
        head = stem.rstrip("0123456789")
        rest = head, len(stem), suffix
        if rest != last:  # a cache: most classes are numbered, and only the number changes
            text = f"{head}\0{len(stem)}\0{suffix}".encode(errors="surrogateescape")
            last = rest
            base = int.from_bytes(
                blake2b(text, digest_size=8, key=key, person=_KIND).digest(), "little"
            )
        bases.append(base)
        numbers.append(int(stem[len(head) :] or 0) % 2**64)
    return np.array(bases, np.uint64) + np.array(numbers, np.uint64) * np.uint64(_GOLDEN)


def group_ids(names: Iterable[str]) -> np.ndarray:
    """Return an id for each group's name, (N,) uint64, for `Samples.groups`. It depends only on the name."""
    return hashes(names)


def first_of_groups(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the first image of each group, sorted, (G,), and the place there of each image's, (N,)."""
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[group_of]


@dataclass(frozen=True)
class Units:
    """Groups of images that are split as a whole, M.

    Attributes:
        places: Place of each group on the circle, (M,), in [0, 1).
        strata: Stratum of each group, (M,).
        of_image: Index of each image's group, (N,).
    """

    places: np.ndarray
    strata: np.ndarray
    of_image: np.ndarray


def stratified(
    names: Iterable[str],
    strata: np.ndarray,
    fractions: Sequence[float],
    seed: int,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Split images at random by their own names, with the same proportions in each class.

    The `hashes` of the names are points on a circle of length 1. Each part is an arc as long as its fraction. So an
    image that is added, removed or renamed does not move another one. The price is that fractions are not exact. They
    are within about one image in a class of numbered images, and random in a class of other names: 10 ± 3 of 100.
    (Exact fractions would move an image for about every other one that is added.)

    If a class is so small that a part would be empty, the part takes the image nearest to its arc: first training, then
    the others in their order. In such a class a change may move one image per part.

    The images of one group go together, by the hash of the group; see `units_of`.

    Args:
        names: Name of each image, N.
        strata: Class index of each image, (N,), or the index of another group to split in the same proportions.
        fractions: Share of each part except the first, which gets the rest.
        seed: Seed of the split.
        groups: Group of each image, (N,), as `group_ids` returns them; None if each image is a group of its own.

    Returns:
        One sorted array of indices for the rest and one for each fraction. Together they hold every index once.
    """
    units = units_of(names, strata, seed, groups)
    parts = _arcs(units.places, units.strata, fractions)
    return [np.flatnonzero(parts[units.of_image] == part) for part in range(len(fractions) + 1)]


def with_each_label(
    labels: np.ndarray, groups: np.ndarray, parts: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return parts of images such that the first one, for training, has images of each label.

    A label whose images are all in other parts, because of their rarer labels, gives its first image to training,
    with the group of the image.

    Args:
        labels: Whether each image has each label, (N, K).
        groups: Group of each image, (N,).
        parts: The parts, as `stratified` returns them.
    """
    part_of = np.zeros(len(labels), np.int64)
    for number, rows in enumerate(parts):
        part_of[rows] = number
    for has_label in labels.astype(bool).T:
        if part_of[has_label].all() and has_label.any():
            part_of[groups == groups[has_label.argmax()]] = 0
    return [np.flatnonzero(part_of == number) for number in range(len(parts))]


def fold_parts(units: Units, fold: int, num_folds: int, val_fraction: float) -> list[np.ndarray]:
    """Return the training, validation and test images of one fold of a cross-validation.

    Each fold is tested on an arc of the circle of `stratified`, so an image that is added moves no other one. The arcs
    of a small class are filled as the parts of `stratified`. The number of its stratum decides which folds it leaves
    out, so strata that are hashes leave out different ones. The arc behind the tested one is for validation.

    Args:
        units: The groups of images.
        fold: The fold, from 1 to `num_folds`.
        num_folds: Number of folds.
        val_fraction: Share of all images for validation.

    Returns:
        Three sorted arrays of indices. Together they hold every index once.
    """
    tested = _arcs(units.places, units.strata, [1 / num_folds] * (num_folds - 1), is_turned=True)
    rest = np.flatnonzero(tested != fold % num_folds)  # the last fold is the rest of the arcs, 0
    places = (units.places[rest] - fold / num_folds) % 1
    parts = np.full(len(units.places), 2)
    parts[rest] = _arcs(places, units.strata[rest], [val_fraction])
    return [np.flatnonzero(parts[units.of_image] == part) for part in range(3)]


def units_of(
    names: Iterable[str], strata: np.ndarray, seed: int, groups: np.ndarray | None
) -> Units:
    """Return the groups to split. For the arguments see `stratified`.

    A group of one image has the place of the image's own name, so groups of one image each are split as images without
    groups. The stratum of a group is the one of its strata that the fewest groups hold: like this each part gets images
    of a rare class, even if they share their groups with a frequent one.
    """
    places = hashes(names, seed)
    if groups is not None:
        ids, first, of_image, sizes = np.unique(
            groups, return_index=True, return_inverse=True, return_counts=True
        )
    if groups is None or len(ids) == len(places):
        return Units(places / 2.0**64, strata, np.arange(len(places)))
    # The seed rotates the groups on the circle, so that numbered groups stay evenly spaced.
    of_groups = ids.astype(np.uint64) + hashes([""], seed)
    places = np.where(sizes == 1, places[first], of_groups)
    # each stratum of each group once
    of_group, of_stratum = np.unique(np.stack([of_image, strata]), axis=1)
    _, index, num_groups = np.unique(of_stratum, return_inverse=True, return_counts=True)
    order = np.lexsort([of_stratum, num_groups[index], of_group])
    rarest = order[np.unique(of_group[order], return_index=True)[1]]
    return Units(places / 2.0**64, of_stratum[rarest], of_image)


def _arcs(
    places: np.ndarray, strata: np.ndarray, fractions: Sequence[float], is_turned: bool = False
) -> np.ndarray:
    """Return the part of each group, (M,): 0 for the rest, which is the last arc, then one number per fraction.

    Args:
        places: Place of each group on the circle, (M,).
        strata: Stratum of each group, (M,).
        fractions: Share of each part except the rest.
        is_turned: Whether a small stratum fills the parts from one that its number decides, not from the first.
    """
    edges = np.cumsum(fractions)
    num_parts = len(fractions) + 1
    # 0 for the rest, which follows all others
    parts = (np.searchsorted(edges, places, side="right") + 1) % num_parts
    wanted = [0, *(part for part, fraction in enumerate(fractions, 1) if fraction > 0)]
    order = np.argsort(strata, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(strata[order])) + 1):
        # Each empty part takes the nearest group of a part that can spare one. The first parts come first.
        first = int(strata[members[0]]) % num_parts if is_turned else 0
        required = sorted((wanted[first:] + wanted[:first])[: len(members)])
        for part in required:
            counts = np.bincount(parts[members], minlength=num_parts)
            if counts[part]:
                continue
            if part == 0:
                low = edges[-1]
                high = 1.0
            else:
                low = edges[part - 2] if part > 1 else 0.0
                high = edges[part - 1]
            spare = members[counts[parts[members]] > np.isin(parts[members], required)]
            distances = np.minimum((low - places[spare]) % 1, (places[spare] - high) % 1)
            parts[spare[np.argmin(distances)]] = part
    return parts
