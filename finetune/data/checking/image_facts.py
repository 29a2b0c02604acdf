"""Properties of each image: whether it is readable, its format, size and colours, and a small grey copy.

Each file is decoded once, a JPEG at a reduced size. Only numbers and the copies are stored, 2.4 KB per image.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from finetune.data.addresses import StorageError
from finetune.data.decode import open_image, read_pixels, silence_pillow
from finetune.data.image_files import file_stats, open_file
from finetune.data.mirror import map_files
from finetune.system.machine import num_cores
from finetune.system.messages import reason

# Shapes: N images.

SIDE = 48  # pixels of the grey copies, which are squashed to a square
_MAX_THREADS = 16  # decoding a malicious image may take 2.9 GB


class ImageFacts(NamedTuple):
    """The properties of one image; see `Facts`."""

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


@dataclass(frozen=True)
class Facts:
    """The properties of N images. For unreadable images all other values are empty or zero.

    Attributes:
        errors: Error of each image, "" if it is readable.
        kinds: Format by content, such as JPEG.
        modes: Pillow's mode, with `;16` for 16 bits, `animated` for several frames, and `of several pages` for a TIFF
            with several pages.
        sizes: Height and width from the header, after EXIF rotation, (N, 2).
        num_bytes: Size of each file in bytes, (N,).
        changed: Modification time of each file, in seconds since 1970, (N,).
        colours: Mean red, green and blue, (N, 3).
        grey: Small grey copies, (N, SIDE, SIDE) uint8.
        contrast: Standard deviation of the pixels of a small copy, the largest of the three channels, (N,).
        brightest: 99th percentile of the pixels of a small copy, by the largest channel of each pixel, (N,).
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

    @property
    def is_readable(self) -> np.ndarray:
        return np.array([not error for error in self.errors], bool)

    @property
    def brightness(self) -> np.ndarray:
        """Mean of the pixels, (N,), from 0 to 255."""
        return self.grey.mean(axis=(1, 2))

    @property
    def aspects(self) -> np.ndarray:
        """Width over height, (N,); 1 for unreadable images."""
        return np.where(self.is_readable, self.sizes[:, 1] / np.maximum(self.sizes[:, 0], 1), 1.0)


def inspect_images(paths: Sequence[str]) -> Iterator[ImageFacts]:
    """Return an iterator of the properties of each image, in order. Images are decoded by several threads."""
    silence_pillow()
    cv2.setNumThreads(0)  # images are already processed in parallel
    return map_files(inspect_image, paths, min(num_cores(), _MAX_THREADS))


def collect_facts(facts_of_images: Iterable[ImageFacts], num: int) -> Facts:
    """Return the properties of `num` images as arrays."""
    errors: list[str] = []
    kinds: list[str] = []
    modes: list[str] = []
    sizes = np.zeros((num, 2), np.int64)
    colours = np.zeros((num, 3), np.float32)
    num_bytes = np.zeros(num, np.int64)
    changed = np.zeros(num)
    grey = np.zeros((num, SIDE, SIDE), np.uint8)
    contrast = np.zeros(num, np.float32)
    brightest = np.zeros(num, np.float32)
    for i, image in enumerate(facts_of_images):
        errors.append(image.error)
        kinds.append(image.kind)
        modes.append(image.mode)
        sizes[i] = image.size
        num_bytes[i] = image.num_bytes
        changed[i] = image.changed
        colours[i] = image.colour
        contrast[i] = image.contrast
        brightest[i] = image.brightest
        if image.grey is not None:
            grey[i] = image.grey
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
    )


def inspect_image(path: str) -> ImageFacts:
    """Return the properties of one image."""
    kind = ""
    mode = ""
    size = (0, 0)
    num_bytes = 0
    changed = 0.0
    try:
        with open_file(path) as file:
            stats = file_stats([path])
            num_bytes = int(stats.sizes[0])
            seconds, nanoseconds = divmod(int(stats.times[0, 0]), 10**9)
            changed = seconds + 1e-9 * nanoseconds
            image = open_image(file)
            kind = image.format or ""
            mode = _mode(image)
            size = (image.height, image.width)
            image.draft(None, (2 * SIDE, 2 * SIDE))  # only affects a JPEG
            pixels = read_pixels(image, file)
            # rotated by its EXIF orientation
            if (pixels.shape[0] - pixels.shape[1]) * (size[0] - size[1]) < 0:
                size = size[::-1]
    except StorageError:
        raise
    except Exception as error:  # for damaged files Pillow raises nearly any exception
        text = (
            (error.strerror if isinstance(error, OSError) else None)
            or reason(error)
            or type(error).__name__
        )
        return ImageFacts(
            error=text,
            kind=kind,
            mode=mode,
            size=size,
            num_bytes=num_bytes,
            changed=changed,
            colour=(0, 0, 0),
            grey=None,
        )
    height, width = pixels.shape[:2]
    kernel = cv2.INTER_AREA if height >= SIDE and width >= SIDE else cv2.INTER_LINEAR
    small = cv2.resize(pixels, (SIDE, SIDE), interpolation=kernel)
    red, green, blue = small.reshape(-1, 3).mean(axis=0).tolist()
    grey = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    return ImageFacts(
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
    )


def small_copy(path: str, side: int) -> np.ndarray | None:
    """Return an image (h, w, 3) for a thumbnail, a large JPEG reduced to at least `side` pixels; None if unreadable.

    Args:
        path: The image.
        side: Side of the thumbnail.
    """
    silence_pillow()
    try:
        with open_file(path) as file:
            image = open_image(file)
            image.draft(None, (side, side))
            return read_pixels(image, file)
    except StorageError:
        raise
    except Exception:  # any exception: see `inspect_image`
        return None


def _mode(image: ImageFile) -> str:
    mode = image.mode
    if ";16" in str(image.tile) and ";16" not in mode:  # Pillow loads 16-bit colours as 8 bits
        mode += ";16"
    if not _is_several(image):
        return mode
    return f"{mode} of several pages" if image.format == "TIFF" else f"{mode} animated"


def _is_several(image: ImageFile) -> bool:
    if isinstance(image, TiffImageFile):  # Pillow would read the complete file to count its pages
        tags: Any = image.tag_v2
        return bool(tags.next)
    return bool(getattr(image, "is_animated", False))
