"""Properties of each image: whether it is readable, its format, size and colours, and a small grey copy.

Each file is decoded once, a JPEG at a reduced size. Only numbers and the copies are stored, 2.4 KB per image.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import cv2
import numpy as np
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from finetune.data.decode import DecodeError, decode, decoding, open_image, read_pixels
from finetune.data.file_facts import digest_of
from finetune.data.image_files import file_stats, open_file
from finetune.data.mirror import map_files
from finetune.system.machine import num_cores

# Shapes: N images.

SIDE = 48  # pixels of the grey copies, which are squashed to a square
_MAX_THREADS = 16  # decoding a malicious image may take 2.9 GB


class Facts(np.recarray):
    """The properties of N images. For unreadable images all but `errors` and what their header says is empty or zero.

    Attributes:
        errors: Error of each image, "" if it is readable.
        kinds: Format by content, such as JPEG.
        modes: Pillow's mode, with `;16` for 16 bits, and `of several frames` for an animation or several pages.
        sizes: Height and width from the header, after EXIF rotation, (N, 2).
        num_bytes: Size of each file in bytes, (N,).
        changed: Modification time of each file, in seconds since 1970, (N,).
        digests: Digest of the content, as in `FileFacts`, (N,).
        colours: Mean red, green and blue, (N, 3).
        grey: Small grey copies, (N, SIDE, SIDE) uint8.
        contrast: Standard deviation of the pixels of a small copy, the largest of the three channels, (N,).
        brightest: 99th percentile of the pixels of a small copy, by the largest channel of each pixel, (N,).
    """

    @property
    def is_readable(self) -> np.ndarray:
        return np.asarray(self.errors == "")

    @property
    def brightness(self) -> np.ndarray:
        """Mean of the pixels, (N,), from 0 to 255."""
        return np.asarray(self.grey.mean(axis=(1, 2)))

    @property
    def aspects(self) -> np.ndarray:
        """Width over height, (N,); 1 for unreadable images."""
        return np.where(self.is_readable, self.sizes[:, 1] / np.maximum(self.sizes[:, 0], 1), 1.0)


_FACTS = np.dtype(
    [
        ("errors", object),
        ("kinds", "U8"),
        ("modes", "U32"),
        ("sizes", np.int64, 2),
        ("num_bytes", np.int64),
        ("changed", np.float64),
        ("digests", np.uint64),
        ("colours", np.float32, 3),
        ("grey", np.uint8, (SIDE, SIDE)),
        ("contrast", np.float32),
        ("brightest", np.float32),
    ]
)


def empty_facts(num: int) -> Facts:
    """Return facts of `num` images of which nothing is known."""
    facts = np.zeros(num, _FACTS).view(Facts)
    facts.errors = ""
    return facts


def collect_facts(facts_of_images: Iterable[Facts], num: int) -> Facts:
    """Return the properties of `num` images together."""
    facts = empty_facts(num)
    for i, image in enumerate(facts_of_images):
        facts[i : i + 1] = image
    return facts


def inspect_images(paths: Sequence[str]) -> Iterator[Facts]:
    """Return an iterator of the properties of each image, in order. Images are decoded by several threads."""
    cv2.setNumThreads(0)  # images are already processed in parallel
    return map_files(inspect_image, paths, min(num_cores(), _MAX_THREADS))


def inspect_image(path: str) -> Facts:
    """Return the properties of one image."""
    facts = empty_facts(1)
    try:
        with decoding(path):
            with open_file(path) as file:
                stats = file_stats([path])
                facts.num_bytes = stats.sizes
                facts.changed = stats.times[:, 0] / 1e9
                open_image(file)  # refuses a file above the limits before it is read
                file.seek(0)
                content = file.read()
            facts.digests = digest_of(content)
            file = io.BytesIO(content)
            image = open_image(file)
            facts.kinds = image.format or ""
            facts.modes = _mode(image)
            size = (image.height, image.width)
            facts.sizes = size
            image.draft(None, (2 * SIDE, 2 * SIDE))  # only affects a JPEG
            pixels = read_pixels(image, file)
    except DecodeError as error:
        facts.errors = error.reason
        return facts
    height, width = pixels.shape[:2]
    # rotated by its EXIF orientation
    if (height - width) * (size[0] - size[1]) < 0:
        facts.sizes = size[::-1]
    kernel = cv2.INTER_AREA if height >= SIDE and width >= SIDE else cv2.INTER_LINEAR
    small = cv2.resize(pixels, (SIDE, SIDE), interpolation=kernel)
    facts.colours = small.reshape(-1, 3).mean(axis=0)
    facts.grey = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    facts.contrast = small.std(axis=(0, 1)).max()
    facts.brightest = np.percentile(small.max(axis=2), 99)
    return facts


def small_copy(path: str, side: int) -> np.ndarray | None:
    """Return an image (h, w, 3) for a thumbnail, a large one reduced to `side` pixels; None if unreadable.

    Args:
        path: The image.
        side: Its shorter side.
    """
    with suppress(DecodeError):
        return decode(path, shorter_side=side)
    return None


def _mode(image: ImageFile) -> str:
    mode = image.mode
    if ";16" in str(image.tile) and ";16" not in mode:  # Pillow loads 16-bit colours as 8 bits
        mode += ";16"
    # Pillow would follow all pages of a TIFF for `is_animated`
    if isinstance(image, TiffImageFile):
        tags: Any = image.tag_v2
        has_several = bool(tags.next)
    else:
        has_several = getattr(image, "is_animated", False)
    return f"{mode} of several frames" if has_several else mode
