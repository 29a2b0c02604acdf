"""Files with equal content: compared by size first, then by the bytes of files of equal size."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np

from finetune.data.addresses import StorageError
from finetune.data.contents import middle_digest
from finetune.data.files import open_file
from finetune.data.mirror import map_files


def equal_files(
    paths: Sequence[str], num_bytes: np.ndarray, group_of: np.ndarray | None = None
) -> list[list[int]]:
    """Return the sets of files that are equal byte for byte, each sorted. Unreadable files are skipped.

    Sizes distinguish most files without reading them, and 4 kB from the middle nearly all others. Only files that agree
    in both are read completely.

    Args:
        paths: Path of each file, N.
        num_bytes: Size of each file, (N,). Files with a size of 0 or below are skipped.
        group_of: Group of each file, (N,). If given, only sets with files of more than one group are returned.
    """

    def is_wanted(members: np.ndarray) -> bool:
        return len(members) > 1 and (group_of is None or len(np.unique(group_of[members])) > 1)

    order = np.argsort(num_bytes, kind="stable")
    order = order[num_bytes[order] > 0]
    sets = [
        s for s in np.split(order, np.flatnonzero(np.diff(num_bytes[order])) + 1) if is_wanted(s)
    ]
    for digest in (middle_digest, _hash_content):
        sets = [equal for equal in _divide(paths, sets, digest) if is_wanted(equal)]
    return sorted(sorted(members.tolist()) for members in sets)


def _divide(
    paths: Sequence[str], sets: Sequence[np.ndarray], digest: Callable[[str], bytes]
) -> Iterable[np.ndarray]:
    """Divide each set of files by their digests. All files are read in one go, since requests are sent ahead."""

    def digest_or_none(path: str) -> bytes | None:
        try:
            return digest(path)
        except StorageError:
            raise
        except (OSError, ValueError):  # reported when the image is read
            return None

    files = [(number, i) for number, members in enumerate(sets) for i in members.tolist()]
    digests = map_files(digest_or_none, (paths[i] for _, i in files))
    equal: dict[tuple[int, bytes], list[int]] = {}
    for (number, i), of_file in zip(files, digests, strict=True):
        if of_file is not None:
            equal.setdefault((number, of_file), []).append(i)
    return map(np.array, equal.values())


def _hash_content(path: str) -> bytes:
    digest = blake2b(digest_size=16)
    with open_file(path) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.digest()
