"""Images for the page: decoded and scaled when it asks for them, the last ones kept in memory."""

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
    """Images as WebP files of bounded size. The images that were asked for last are kept.

    Args:
        paths: Path of each image.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._kept: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, index: int, side: str) -> bytes | None:
        """Return image `index` as a WebP file with at most `SIDES[side]` pixels a side; None if it cannot be read."""
        key = (index, side)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        content = _scaled(self.paths[index], SIDES[side])
        if content is not None:
            self._keep(key, content)
        return content

    def _keep(self, key: tuple[int, str], content: bytes) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = content
                self._num_bytes += len(content)
            while self._num_bytes > _MAX_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= len(oldest)


def _scaled(path: str, side: int) -> bytes | None:
    pixels = small_copy(path, side)
    if pixels is None:
        return None
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, format="WebP", quality=80, method=1)
    return file.getvalue()
