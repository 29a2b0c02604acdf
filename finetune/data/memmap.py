"""Many pictures in one file that is mapped into memory, so that all processes of a machine share one copy.

The file begins with a header that marks it as ours; then come the pixels of each picture in turn, (H, W, 3) uint8;
behind them stand where each begins and its
height and width, as arrays; then JSON that says what the pictures are; last the trailer. It is written under another
name, brought to the disk and renamed, so it is whole or absent.

On opening, the length of the file and the checksum of all that is behind the pixels are checked, and that the pictures
fill the rest exactly. The pixels themselves are not: that would mean to read them all.
"""

# Shapes: N pictures in a file.

import hashlib
import json
import mmap
import os
import struct
from array import array
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from finetune.system.cache_dir import HEADER_BYTES, MARK
from finetune.system.files import replacing, unfinished

# what this is, N, where the arrays begin, SHA-256 of what is from there to here
_TRAILER = struct.Struct("<16sQQ32s")
_MAGIC = b"finetune packed2"
# so much is sent to the disk while the next pictures come, instead of all at the end
_SYNC_BYTES = 2**28


class MemmapImages:
    """The pictures of a file, which takes 16 bytes for each beside its pixels.

    Attributes:
        about: What `write_memmap` was told.

    Raises:
        OSError: There is no such file, or it may not be read.
        ValueError: It is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            # an empty file is a ValueError
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = len(self._map) - _TRAILER.size
        magic, num, start, checksum = (
            _TRAILER.unpack_from(self._map, end) if end >= 0 else (b"", 0, 0, b"")
        )
        if magic != _MAGIC:
            raise ValueError(f"{path} is cut off, or no file of this kind and version")
        with memoryview(self._map) as content:
            if start + 16 * num > end or hashlib.sha256(content[start:end]).digest() != checksum:
                raise ValueError(f"{path} is damaged: its index is not what was written")
        self.about: dict[str, Any] = json.loads(self._map[start + 16 * num : end])
        self._offsets = np.frombuffer(self._map, np.int64, num, start)
        self._shapes = np.frombuffer(self._map, np.int32, 2 * num, start + 8 * num).reshape(num, 2)
        self._pixels = np.frombuffer(
            self._map, np.uint8, max(0, start - HEADER_BYTES), HEADER_BYTES
        )
        sizes = 3 * self._shapes.astype(np.int64).prod(axis=1)
        end_of_pixels = HEADER_BYTES + int(sizes.sum())
        if not np.array_equal(self._offsets, np.cumsum(sizes) - sizes) or start != _aligned(
            end_of_pixels
        ):
            raise ValueError(
                f"{path} is damaged: it holds more or fewer pixels than its index says"
            )

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> np.ndarray | None:
        """Return picture i as a view that can't be written to, or None where there was none."""
        start, (height, width) = int(self._offsets[i]), self._shapes[i].tolist()
        if not height:
            return None
        return self._pixels[start : start + 3 * height * width].reshape(height, width, 3)

    def __reduce__(self) -> tuple[Any, ...]:
        return MemmapImages, (self.path,)  # a spawned process maps the file itself


def opened(path: Path) -> MemmapImages | None:
    """Return the pictures of a file, None where it is not there or damaged."""
    try:
        return MemmapImages(path)
    except (OSError, ValueError):
        return None


class TooLarge(Exception):
    """The pictures take more bytes than they may."""


def write_memmap(
    path: Path, pictures: Iterable[np.ndarray | None], about: dict[str, Any], max_bytes: float
) -> None:
    """Write pictures (H, W, 3) uint8 into a file, or leave nothing behind; what was there before is replaced.

    Args:
        path: The file.
        pictures: One at a time is held; None stands for a picture that could not be had.
        about: What to say of them, as JSON can hold it.
        max_bytes: Most that the pixels may take.

    Raises:
        OSError: The disk is full, or fails.
        TooLarge: Above `max_bytes`.
    """
    offsets, shapes = array("q"), array("i")
    position, synced = 0, 0
    syncs: list[Future] = []
    for old in unfinished(path):
        old.unlink(missing_ok=True)
    with replacing(path) as temporary, open(temporary, "wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(MARK.ljust(HEADER_BYTES, b"\0"))
        for picture in pictures:
            offsets.append(position)
            shapes.extend((0, 0) if picture is None else picture.shape[:2])
            if picture is not None:
                position += file.write(np.ascontiguousarray(picture).data.cast("B"))
            if position > max_bytes:
                raise TooLarge(f"they take more than the {max_bytes / 1e9:.1f} GB that they may")
            if position - synced > _SYNC_BYTES:
                synced = position
                syncs.append(pool.submit(os.fsync, file.fileno()))
        index = offsets.tobytes() + shapes.tobytes() + json.dumps(about).encode()
        start = _aligned(HEADER_BYTES + position)
        file.write(bytes(start - HEADER_BYTES - position) + index)
        file.write(_TRAILER.pack(_MAGIC, len(offsets), start, hashlib.sha256(index).digest()))
        for sync in syncs:
            sync.result()  # an error of the disk is told to one call only


def _aligned(position: int) -> int:
    return -(-position // 64) * 64
