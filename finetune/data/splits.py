"""The random splits: an image's split depends on its own name, so other images do not move it."""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from finetune.system.file_names import composed

SET_APART = "set apart from training"

# The names of splits, in lower case: case does not matter.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

_KIND = b"finetune split"  # at most 16 bytes; separates these hashes from other uses of the seed
# 2**64 / golden ratio: its multiples are spread evenly over [0, 2**64) (Knuth, Art of Computer Programming, 6.4).
_GOLDEN = 0x9E3779B97F4A7C15


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
            last, base = (
                rest,
                int.from_bytes(
                    blake2b(text, digest_size=8, key=key, person=_KIND).digest(), "little"
                ),
            )
        bases.append(base)
        numbers.append(int(stem[len(head) :] or 0) % 2**64)
    return np.array(bases, np.uint64) + np.array(numbers, np.uint64) * np.uint64(_GOLDEN)


def group_ids(names: Iterable[str]) -> np.ndarray:
    """Return an id for each group's name, (N,) uint64, for `Samples.groups`. It depends only on the name."""
    return hashes(names)


def stratified(
    names: Iterable[str], strata: np.ndarray, fractions: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Split images at random by their own names, with the same proportions in each class.

    The `hashes` of the names are points on a circle of length 1. Each part is an arc as long as its fraction. So an
    image that is added, removed or renamed does not move another one. The price is that fractions are not exact. They
    are within about one image in a class of numbered images, and random in a class of other names: 10 ± 3 of 100.
    (Exact fractions would move an image for about every other one that is added.)

    If a class is so small that a part would be empty, the part takes the image nearest to its arc: first training, then
    the others in their order. In such a class a change may move one image per part.

    Args:
        names: Name of each image, N.
        strata: Class index of each image, (N,), or the index of another group to split in the same proportions.
        fractions: Share of each part except the first, which gets the rest.
        seed: Seed of the split.

    Returns:
        One sorted array of indices for the rest and one for each fraction. Together they hold every index once.
    """
    places, edges = hashes(names, seed) / 2.0**64, np.cumsum(fractions)
    num_parts = len(fractions) + 1
    # 0 for the rest, which follows all others
    parts = (np.searchsorted(edges, places, side="right") + 1) % num_parts
    wanted = [0, *(part for part, fraction in enumerate(fractions, 1) if fraction > 0)]
    order = np.argsort(strata, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(strata[order])) + 1):
        due = wanted[: len(members)]
        for part in due:
            counts = np.bincount(parts[members], minlength=num_parts)
            if counts[part]:
                continue
            low, high = (
                (edges[part - 2] if part > 1 else 0.0, edges[part - 1])
                if part
                else (edges[-1], 1.0)
            )
            spare = members[counts[parts[members]] > np.isin(parts[members], due)]
            away = np.minimum((low - places[spare]) % 1, (places[spare] - high) % 1)
            parts[spare[np.argmin(away)]] = part
    return [np.flatnonzero(parts == part) for part in range(num_parts)]
