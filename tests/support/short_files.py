"""Image files of every format, and what is left of them when a transfer or a disk ends too early."""

import struct
import zlib

import numpy as np
from image_files import encode
from PIL import Image

H, W = 120, 160
_Y, _X = np.mgrid[:H, :W]
RGB = np.stack(
    [_X * 255 // W, _Y * 255 // H, np.random.default_rng(0).integers(0, 255, (H, W))], -1
).astype(np.uint8)
_GREY = RGB[..., 0] ^ RGB[..., 2]
_ALPHA = np.dstack([RGB, 255 - RGB[..., 0] // 4])
_INK = Image.fromarray(RGB).convert("CMYK")


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    rows: list[bytes], bits: int, colour_type: int, *chunks: bytes, size: tuple[int, int] = (W, H)
) -> bytes:
    """A PNG of these rows, each with the byte of its filter before it; `chunks` precede the pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, colour_type, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + png_chunk(b"IEND", b"")


def _png_16_bits() -> bytes:
    return png([b"\0" + row.tobytes() for row in (RGB * 256.0 + 3).astype(">u2")], 16, 2)


def _with_a_harmless_warning(content: bytes) -> bytes:
    """A JPEG with bytes before its tables. libjpeg warns of them, and of nothing that follows."""
    tables = content.index(b"\xff\xdb")
    return content[:tables] + b"abc" + content[tables:]


def _bmp_rle() -> bytes:
    image = Image.fromarray(RGB).quantize(64)
    colours = np.array(image.getpalette("RGB")[: 3 * 64], np.uint8).reshape(64, 3)[:, ::-1]
    palette = np.pad(colours, ((0, 0), (0, 1))).tobytes()
    rows = [b"".join(bytes([1, i]) for i in row) + b"\0\0" for row in np.asarray(image)[::-1]]
    data = b"".join(rows) + b"\0\1"
    start = 54 + len(palette)
    header = struct.pack("<2sIIIIii", b"BM", start + len(data), 0, start, 40, W, H)
    return header + struct.pack("<HHIIiiII", 1, 8, 1, len(data), 0, 0, 64, 0) + palette + data


_JPEGS = {
    "jpeg": encode(RGB, "JPEG"),
    "jpeg 4:4:4": encode(RGB, "JPEG", subsampling=0),
    "jpeg grey": encode(_GREY, "JPEG"),
    "jpeg cmyk": encode(_INK, "JPEG"),
    "jpeg progressive": encode(RGB, "JPEG", progressive=True),
    "jpeg restarts": encode(RGB, "JPEG", restart_marker_blocks=7),
}
FILES = {
    **_JPEGS,
    **{
        f"{kind} with a warning": _with_a_harmless_warning(content)
        for kind, content in _JPEGS.items()
    },
    "png": encode(RGB, "PNG"),
    "png grey": encode(_GREY, "PNG"),
    "png palette": encode(Image.fromarray(RGB).quantize(64), "PNG"),
    "png alpha": encode(_ALPHA, "PNG"),
    "png 16 bits": _png_16_bits(),
    "tiff": encode(RGB, "TIFF"),
    **{
        f"tiff {name}": encode(RGB, "TIFF", compression=name)
        for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
    },
    "webp": encode(RGB, "WEBP"),
    "webp lossless": encode(RGB, "WEBP", lossless=True),
    "webp alpha": encode(_ALPHA, "WEBP"),
    "gif": encode(Image.fromarray(RGB).quantize(64), "GIF"),
    "gif interlaced": encode(Image.fromarray(RGB).quantize(64), "GIF", interlace=1),
    "bmp": encode(RGB, "BMP"),
    "bmp rle": _bmp_rle(),
}
ENDS = {"jpeg": b"\xff\xd9", "png": png_chunk(b"IEND", b""), "gif": b";"}
# kinds whose data cannot be zeros: other libraries take zeros for black or grey pixels
NOT_ZEROS = [
    kind
    for kind in FILES
    if kind.startswith(("jpeg", "png", "gif"))
    or kind in ("tiff tiff_lzw", "tiff packbits", "webp lossless")
]


def cut(kind: str, num_bytes: int, has_end: bool = False) -> bytes:
    """Return the first bytes of a file, with an end marker after them if its format has one."""
    end = ENDS.get(kind.partition(" ")[0], b"") if has_end else b""
    return FILES[kind][:num_bytes] + end
