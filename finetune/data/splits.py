"""Which pictures are set apart for validation and testing: each by its own name, so that no other picture moves it."""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from finetune.system.file_names import composed

SET_APART = "set apart from training"

_KIND = b"finetune split"  # at most 16 bytes: no other use of a seed gets these hashes
# 2**64 over the golden ratio: multiples of it fall evenly into [0, 2**64) (Knuth, Art of Computer Programming, 6.4).
_GOLDEN = 0x9E3779B97F4A7C15


def hashes(names: Iterable[str], seed: int | None = None) -> np.ndarray:
    """Return a number of 64 bits for each name, (N,) uint64, which depends on that name and the seed alone.

    A name that ends in a number, as `cat/0017.jpg`, gets the hash of all but the number, plus the number times 2**64
    over the golden ratio: numbered pictures lie evenly, all others at random. Names that differ only in how Unicode
    composes their letters are equal: a copy of a folder on macOS may spell é as two characters.
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
        if rest != last:  # a class is one run of numbers, mostly
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


def stratified(
    names: Iterable[str], strata: np.ndarray, fractions: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Split pictures at random, each class in the same proportions, each picture by its own name.

    The `hashes` of the names lie on a circle of length 1, on which the parts are arcs as long as their fractions. So
    nothing that is added, removed or renamed moves another picture; the price is that fractions are not exact. They
    hold to about one picture in a class of numbered pictures, and as well as drawing lots does in one of other names:
    10 ± 3 of 100. (Counting off exact fractions would move a picture for about every other one that is added.)

    Only where a class is so small that a part would get none does it take the picture nearest to its arc: training
    first, then the others in their order. So what comes or goes may move one picture for each part there.

    Args:
        names: What to call each picture; N of them.
        strata: Class index of each, (N,), or the index of another group to split in the same proportions.
        fractions: Share of each part but the first, which gets the rest.
        seed: Seed of the choice.

    Returns:
        One sorted array of indices for the rest and one for each fraction; together every index once.
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
