"""One look at each file: a digest of its content, whether it begins like an image, and of some files the size.

12 kB of a compressed file are read, and all of a BMP or TIFF, which may be uncompressed and differ in one pixel. Of
object storage these pieces are requested, so that a fit does not wait until all images are copied. With cached files
100,000 digests take 3 seconds of one core (40 kB each, a shared 2-core machine, 3 runs from 2.6 to 3.0 s).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from finetune.data.decode import NUM_HEAD_BYTES, begins_like_image, stored_size
from finetune.data.image_files import open_file, read_pieces
from finetune.data.limits import MAX_BYTES
from finetune.data.mirror import map_files, map_pieces

PIECE = 4096  # bytes
_MAY_BE_UNCOMPRESSED = (b"BM", b"II", b"MM")  # the first bytes of a BMP or TIFF
_NUM_MEASURED = 200  # images whose headers are read: a tenth of a second
UNKNOWN = np.uint64(0)  # the digest of a file that is empty or cannot be read


@dataclass(frozen=True)
class FileFacts:
    """What N files hold.

    Attributes:
        digests: A digest of the size and content of each file, (N,) uint64; `UNKNOWN` for none.
        are_images: Whether each file begins like an image of a format that is read, (N,) bool.
    """

    digests: np.ndarray
    are_images: np.ndarray

    def take(self, rows: np.ndarray) -> "FileFacts":
        """Return the facts of the files at `rows`, in that order."""
        return FileFacts(self.digests[rows], self.are_images[rows])


def look_at(paths: Sequence[str]) -> FileFacts:
    """Return what files hold, from pieces of each."""
    kind = np.dtype([("digest", np.uint64), ("is_image", bool)])
    facts = np.fromiter(map_pieces(_look, paths), kind, len(paths))
    return FileFacts(facts["digest"].copy(), facts["is_image"].copy())


def sizes_of_some(paths: Sequence[str]) -> np.ndarray:
    """Return height and width of some images, (n, 2), before EXIF rotation; (0, 0) if they cannot be read.

    The images are random, because sizes may be periodic in the list, and always the same, so that all processes agree.
    """
    num = min(_NUM_MEASURED, len(paths))
    chosen = np.sort(np.random.default_rng(0).choice(len(paths), num, replace=False))
    sizes = map_files(stored_size, (paths[i] for i in chosen.tolist()))
    return np.array([*sizes], np.int64).reshape(-1, 2)


def equal_files(contents: np.ndarray, group_of: np.ndarray | None = None) -> list[list[int]]:
    """Return the sets of files of equal content, each sorted.

    Args:
        contents: The digest of each file, or another number that stands for its content, (N,). Files of `UNKNOWN` are
            skipped.
        group_of: Group of each file, (N,). If given, only sets with files of more than one group are returned.
    """
    order = np.argsort(contents, kind="stable")
    order = order[contents[order] != UNKNOWN]
    sets = np.split(order, np.flatnonzero(np.diff(contents[order])) + 1)
    return sorted(
        members.tolist()
        for members in sets
        if len(members) > 1 and (group_of is None or len(np.unique(group_of[members])) > 1)
    )


def digest_of(content: bytes) -> int:
    """Return the digest of a file that was read completely; see `look_at`."""
    pieces = [content]
    if not content.startswith(_MAY_BE_UNCOMPRESSED):
        pieces = [content[start : start + PIECE] for start in _starts(len(content))]
    return _digest(len(content), pieces)


def _look(path: str) -> tuple[int, bool]:
    try:
        size, pieces = read_pieces(path, PIECE, _starts)
        is_image = begins_like_image(pieces[0][:NUM_HEAD_BYTES])
        # larger files are never decoded
        if pieces[0].startswith(_MAY_BE_UNCOMPRESSED) and size <= MAX_BYTES:
            with open_file(path) as file:
                pieces = [file.read()]
    except OSError:  # reading the image will report it
        return int(UNKNOWN), False
    return _digest(size, pieces), is_image


def _digest(size: int, pieces: Sequence[bytes]) -> int:
    if not size:
        return int(UNKNOWN)
    digest = blake2b(size.to_bytes(8, "little"), digest_size=8)
    for piece in pieces:
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little") or 1


def _starts(size: int) -> tuple[int, int, int]:
    """Return where the pieces of a file begin."""
    return 0, max(0, size // 2 - PIECE // 2), max(0, size - PIECE)
