"""Images for the page: decoded and scaled when it asks for them. The latest ones are cached in memory."""

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence

from PIL import Image

from finetune.data.checking.image_facts import small_copy

SIDES = {"large": 1024, "small": 224}  # pixels
_MAX_BYTES = 64 * 2**20  # of all images in memory
TYPE = "image/webp"


class ImagePreviews:
    """Images as WebP files of bounded size, with a cache of those that were requested last.

    Args:
        paths: Path of each image.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._cached: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, index: int, size: str) -> bytes | None:
        """Return image `index` as a WebP file with at most `SIDES[size]` pixels a side; None if it cannot be read."""
        key = (index, size)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        content = _scaled(self.paths[index], SIDES[size])
        if content is not None:
            self._add_to_cache(key, content)
        return content

    def _add_to_cache(self, key: tuple[int, str], content: bytes) -> None:
        with self._lock:
            if key not in self._cached:  # else another thread has scaled it meanwhile
                self._cached[key] = content
                self._num_bytes += len(content)
            while self._num_bytes > _MAX_BYTES and len(self._cached) > 1:
                _, oldest = self._cached.popitem(last=False)
                self._num_bytes -= len(oldest)


def _scaled(path: str, side: int) -> bytes | None:
    """Return an image as a WebP file with at most `side` pixels a side; None if it cannot be read."""
    pixels = small_copy(path, side)
    if pixels is None:
        return None
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, format="WebP", quality=80, method=1)
    return file.getvalue()
