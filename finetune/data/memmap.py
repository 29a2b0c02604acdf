"""Decoded images in one memory-mapped file, so that all processes of a machine share one copy.

Layout of the file: a header with a mark; the pixels of each image, (H, W, 3) uint8; the index with the height and width
of each; JSON that describes the images; the trailer. The file is written under a temporary name, synced and renamed, so
it is complete or absent.

Opening a file checks its length, and the checksum of everything after the pixels. The pixels have no checksum, because
it would require reading them all.
"""

# Shapes: N images in a file.

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

# magic, N, offset of the index, SHA-256 of the index and the JSON
_TRAILER = struct.Struct("<16sQQ32s")
_MAGIC = b"finetune packed3"
# bytes after which the file is synced in the background, instead of everything at the end
_SYNC_BYTES = 2**28


class MemmapImages:
    """The images of a file. In addition to its pixels each takes 8 bytes of the file, and 8 bytes of memory.

    Attributes:
        about: The description that was passed to `write_memmap`.

    Raises:
        OSError: The file does not exist or cannot be read.
        ValueError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            # raises a ValueError for an empty file
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = len(self._map) - _TRAILER.size
        trailer = self._map[max(end, 0) :].rjust(_TRAILER.size)
        magic, num, start, checksum = _TRAILER.unpack(trailer)
        if magic != _MAGIC:
            raise ValueError(f"{path} is truncated, or not a file of this kind and version")
        with memoryview(self._map) as content:
            if hashlib.sha256(content[start:end]).digest() != checksum:
                raise ValueError(f"{path} is damaged: its index is not what was written")
        self.about: dict[str, Any] = json.loads(self._map[start + 8 * num : end])
        self._shapes = np.frombuffer(self._map, np.int32, 2 * num, start).reshape(num, 2)
        self._pixels = np.frombuffer(self._map, np.uint8, start - HEADER_BYTES, HEADER_BYTES)
        self._ends = np.cumsum(3 * self._shapes.astype(np.int64).prod(axis=1))
        if num and self._ends[-1] != len(self._pixels):
            raise ValueError(f"{path} is damaged: it has more or fewer pixels than its index")

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, i: int) -> np.ndarray | None:
        """Return image i as a read-only view; None if it could not be decoded."""
        height, width = self._shapes[i].tolist()
        if not height:
            return None
        end = int(self._ends[i])
        return self._pixels[end - 3 * height * width : end].reshape(height, width, 3)

    def __reduce__(self) -> tuple[Any, ...]:
        return MemmapImages, (self.path,)  # a spawned process maps the file itself


def open_or_none(path: Path) -> MemmapImages | None:
    """Return the images of a file; None if it does not exist or is damaged."""
    try:
        return MemmapImages(path)
    except (OSError, ValueError):
        return None


class TooLarge(Exception):
    """The images are larger than the limit."""


def write_memmap(
    path: Path, images: Iterable[np.ndarray | None], about: dict[str, Any], max_bytes: float
) -> None:
    """Write images (H, W, 3) uint8 to a file. An existing file is replaced; after an error nothing is left.

    Args:
        path: The file.
        images: The images, read one at a time. None stands for an image that could not be decoded.
        about: A description of the images for JSON.
        max_bytes: Limit on the bytes of the pixels.

    Raises:
        OSError: The disk is full, or fails.
        TooLarge: The pixels exceed `max_bytes`.
    """
    shapes = array("i")
    position = 0
    synced = 0
    syncs: list[Future] = []
    for old in unfinished(path):
        old.unlink(missing_ok=True)
    with replacing(path) as temporary, open(temporary, "wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(MARK.ljust(HEADER_BYTES, b"\0"))
        for image in images:
            shapes.extend((0, 0) if image is None else image.shape[:2])
            if image is not None:
                position += file.write(np.ascontiguousarray(image).data.cast("B"))
            if position > max_bytes:
                raise TooLarge(f"they take more than the allowed {max_bytes / 1e9:.1f} GB")
            if position - synced > _SYNC_BYTES:
                synced = position
                syncs.append(pool.submit(os.fsync, file.fileno()))
        index = shapes.tobytes() + json.dumps(about).encode()
        checksum = hashlib.sha256(index).digest()
        file.write(index)
        file.write(_TRAILER.pack(_MAGIC, len(shapes) // 2, HEADER_BYTES + position, checksum))
        for sync in syncs:
            sync.result()  # raises; the system reports a disk error to one fsync call only
