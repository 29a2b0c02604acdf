"""The bound on a picture's size is the one at which Pillow itself refuses."""

import io
import struct
import warnings
import zlib

import pytest
from PIL import Image

from finetune.data.limits import MAX_BYTES, MAX_PIXELS


def png_header(width: int) -> io.BytesIO:
    """Return a PNG that says it is so wide and one pixel high, and holds nothing."""

    def chunk(kind: bytes, content: bytes = b"") -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", width, 1, 8, 0, 0, 0, 0)
    return io.BytesIO(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT"))


def test_it_is_where_pillow_refuses():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # from half of it on
        with Image.open(png_header(MAX_PIXELS)) as image:
            assert image.width == MAX_PIXELS
    with pytest.raises(Image.DecompressionBombError):
        Image.open(png_header(MAX_PIXELS + 1))


def test_a_file_of_the_largest_picture_as_it_is_fits():
    assert MAX_BYTES >= MAX_PIXELS * 4 * 16 // 8
