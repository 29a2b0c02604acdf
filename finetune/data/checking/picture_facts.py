"""What one look at each picture tells: whether it can be read, its kind, size and colours, and a small grey copy.

Each file is decoded once, a JPEG at the smallest fraction of its size that serves the copy. Of all pictures together
only numbers and the copies are kept, 2.4 KB each.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
from PIL.ImageFile import ImageFile

from finetune.data.decode import quiet, read_header, read_pixels
from finetune.data.storage import open_file
from finetune.system.machine import num_cores
from finetune.system.messages import reason

# Shapes: N pictures.

SIDE = 48  # pixels of the grey copies, which are squashed to a square
# what libjpeg makes of missing blocks, and what saving again may change of it
_CUT_GREY, _CUT_TOLERANCE = 128, 2
_MAX_THREADS = 16  # a hostile picture may take 2.5 GB while it is decoded
_SUFFIXES = {
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "bmp": "BMP",
    "gif": "GIF",
}
_SUFFIXES |= {"tif": "TIFF", "tiff": "TIFF"}


class Look(NamedTuple):
    """What is seen of one picture; see `Facts`."""

    error: str
    kind: str
    mode: str
    size: tuple[int, int]
    num_bytes: int
    changed: float
    colour: tuple[float, float, float]
    grey: np.ndarray | None
    contrast: float = 0.0
    brightest: float = 0.0
    warning: str = ""
    cut_share: float = 0.0


@dataclass(frozen=True)
class Facts:
    """What is known of N pictures; where one can't be read the rest is empty or zero.

    Attributes:
        errors: Why a picture can't be read, "" where it can.
        kinds: The format by its content, such as JPEG.
        modes: What its pixels are, in Pillow's words, with `;16` for 16 bits and `animated` for several frames.
        sizes: Height and width that the header states, of the upright picture, (N, 2).
        num_bytes: Of each file, (N,).
        changed: When each file was changed last, in seconds since 1970, (N,).
        colours: Mean red, green and blue, (N, 3).
        grey: Small copies, (N, SIDE, SIDE) uint8.
        contrast: Standard deviation of the pixels of a small copy, in the channel of red, green and blue that has the
            largest, (N,).
        brightest: 99th percentile of the pixels of a small copy, each by its largest channel, (N,).
        warnings: The first warning of libjpeg about a JPEG that decodes all the same, "" for none.
        cut_shares: Share of the rows, at the lower end of a JPEG, that have the grey of missing data, (N,).
    """

    errors: list[str]
    kinds: list[str]
    modes: list[str]
    sizes: np.ndarray
    num_bytes: np.ndarray
    changed: np.ndarray
    colours: np.ndarray
    grey: np.ndarray
    contrast: np.ndarray
    brightest: np.ndarray
    warnings: list[str]
    cut_shares: np.ndarray

    @property
    def is_readable(self) -> np.ndarray:
        return np.array([not error for error in self.errors], bool)

    @property
    def brightness(self) -> np.ndarray:
        """Mean of the pixels, (N,), from 0 to 255."""
        return self.grey.mean(axis=(1, 2))

    @property
    def aspects(self) -> np.ndarray:
        """Width over height, (N,); 1 where a picture can't be read."""
        return np.where(self.is_readable, self.sizes[:, 1] / np.maximum(self.sizes[:, 0], 1), 1.0)


def look_at(paths: Sequence[str]) -> Iterator[Look]:
    """Yield what is seen of each picture, in order; several are decoded at once."""
    quiet()
    cv2.setNumThreads(0)  # the threads here are enough
    with ThreadPoolExecutor(min(num_cores(), _MAX_THREADS)) as threads:
        for first in range(0, len(paths), 256):  # what is under way ends first when we are stopped
            yield from threads.map(look, paths[first : first + 256])


def gathered(looks: Iterable[Look], num: int) -> Facts:
    """Return what was seen of `num` pictures as arrays."""
    errors: list[str] = []
    kinds: list[str] = []
    modes: list[str] = []
    found_warnings: list[str] = []
    sizes, colours = np.zeros((num, 2), np.int64), np.zeros((num, 3), np.float32)
    num_bytes, changed = np.zeros(num, np.int64), np.zeros(num)
    grey = np.zeros((num, SIDE, SIDE), np.uint8)
    contrast = np.zeros(num, np.float32)
    brightest = np.zeros(num, np.float32)
    cut_shares = np.zeros(num, np.float32)
    for i, seen in enumerate(looks):
        errors.append(seen.error)
        kinds.append(seen.kind)
        modes.append(seen.mode)
        sizes[i] = seen.size
        num_bytes[i] = seen.num_bytes
        changed[i] = seen.changed
        colours[i] = seen.colour
        found_warnings.append(seen.warning)
        contrast[i] = seen.contrast
        brightest[i] = seen.brightest
        cut_shares[i] = seen.cut_share
        if seen.grey is not None:
            grey[i] = seen.grey
    return Facts(
        errors=errors,
        kinds=kinds,
        modes=modes,
        sizes=sizes,
        num_bytes=num_bytes,
        changed=changed,
        colours=colours,
        grey=grey,
        contrast=contrast,
        brightest=brightest,
        warnings=found_warnings,
        cut_shares=cut_shares,
    )


def look(path: str) -> Look:
    """Return what is seen of one picture."""
    kind = ""
    mode = ""
    size = (0, 0)
    num_bytes = 0
    changed = 0.0
    try:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            num_bytes, changed = status.st_size, status.st_mtime
            image = read_header(file)
            kind = image.format or ""
            mode = _mode(image)
            size = (image.height, image.width)
            image.draft(None, (2 * SIDE, 2 * SIDE))  # of a JPEG
            pixels, warning = read_pixels(image, file)
            # turned, as its metadata says
            if (pixels.shape[0] - pixels.shape[1]) * (size[0] - size[1]) < 0:
                size = size[::-1]
    except Exception as error:  # damaged files make Pillow raise nearly every kind
        text = (
            (error.strerror if isinstance(error, OSError) else None)
            or reason(error)
            or type(error).__name__
        )
        return Look(text, kind, mode, size, num_bytes, changed, (0, 0, 0), None)
    height, width = pixels.shape[:2]
    way = cv2.INTER_AREA if height >= SIDE and width >= SIDE else cv2.INTER_LINEAR
    small = cv2.resize(pixels, (SIDE, SIDE), interpolation=way)
    red, green, blue = small.reshape(-1, 3).mean(axis=0).tolist()
    grey = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    return Look(
        error="",
        kind=kind,
        mode=mode,
        size=size,
        num_bytes=num_bytes,
        changed=changed,
        colour=(red, green, blue),
        grey=grey,
        contrast=float(small.std(axis=(0, 1)).max()),
        brightest=float(np.percentile(small.max(axis=2), 99)),
        warning=warning,
        cut_share=_cut_share(pixels) if kind == "JPEG" else 0.0,
    )


def _cut_share(pixels: np.ndarray) -> float:
    """Return the share of the rows at the lower end that are flat, in the grey that libjpeg makes of missing data."""
    num_rows = 0
    for row in pixels[::-1]:
        if np.abs(row.astype(np.int16) - _CUT_GREY).max() > _CUT_TOLERANCE:
            break
        num_rows += 1
    return num_rows / len(pixels)


def small_copy(path: str, side: int) -> np.ndarray | None:
    """Return a picture to show, (h, w, 3) with no fewer pixels than `side` if it has them; None if unreadable."""
    quiet()
    with suppress(Exception), open_file(path) as file:  # as in `look`, which says why
        image = read_header(file)
        image.draft(None, (side, side))
        return read_pixels(image, file)[0]
    return None


def kind_of_name(path: str) -> str:
    """Return the format that a file's suffix names."""
    return _SUFFIXES.get(os.path.splitext(path)[1].lower().lstrip("."), "")


def _mode(image: ImageFile) -> str:
    mode = image.mode
    if ";16" in str(image.tile) and ";16" not in mode:  # in colour Pillow keeps 8 of them
        mode += ";16"
    # A TIFF's frames would have to be counted through the whole file.
    is_animated = image.format in ("GIF", "WEBP", "PNG") and getattr(image, "is_animated", False)
    return f"{mode} animated" if is_animated else mode
