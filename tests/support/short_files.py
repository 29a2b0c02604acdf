"""Image files of every format that end too early, each with and without its end marker."""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from image_files import encode
from PIL import Image

H, W = 120, 160
ROWS = 20  # of a strip
_Y, _X = np.mgrid[:H, :W]
RGB = np.stack(
    [_X * 255 // W, _Y * 255 // H, np.random.default_rng(0).integers(0, 255, (H, W))], -1
).astype(np.uint8)

Short = Callable[[float], bytes]  # the file with so much of its data, and a proper end


def _jpeg(image: np.ndarray | Image.Image = RGB, extraneous: bytes = b"", **options) -> Short:
    content = encode(image, "JPEG", **options)
    start = content.index(b"\xff\xdb")
    first_scan = content.index(b"\xff\xda") + len(extraneous)
    content = content[:start] + extraneous + content[start:]

    def short(share: float) -> bytes:
        if share == 1:
            return content
        return (
            content[: first_scan + 20 + int((len(content) - first_scan - 22) * share)] + b"\xff\xd9"
        )

    return short


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    rows: list[bytes], bits: int, colour_type: int, *chunks: bytes, size: tuple[int, int] = (W, H)
) -> bytes:
    """A PNG of these rows, each with the byte of its filter before it; `chunks` precede the pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, colour_type, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + png_chunk(b"IEND", b"")


def _short_png(pixels: np.ndarray, bits: int, colour_type: int) -> Short:
    rows = [b"\0" + row.tobytes() for row in pixels.reshape(H, W, -1)]
    data = b"".join(rows)
    palette = png_chunk(b"PLTE", bytes(range(255, -1, -1)) * 3) if colour_type == 3 else b""
    return lambda share: png([data[: int(len(data) * share)]], bits, colour_type, palette)


def tiff(strips: list[bytes], tags: dict[int, list[int] | bytes]) -> bytes:
    """A little-endian TIFF of these strips, with its header first; lists become 32-bit, texts bytes."""
    tags = {
        256: [W],
        257: [H],
        278: [ROWS],
        273: [0] * len(strips),
        279: [len(s) for s in strips],
    } | tags
    data_at = 8 + 2 + 12 * len(tags) + 4
    values = {
        tag: v if isinstance(v, bytes) else struct.pack(f"<{len(v)}I", *v)
        for tag, v in sorted(tags.items())
    }
    place = data_at + sum(len(v) for v in values.values() if len(v) > 4)
    values[273] = struct.pack(
        f"<{len(strips)}I", *(place + sum(map(len, strips[:i])) for i in range(len(strips)))
    )
    entries = b""
    data = b""
    for tag, value in values.items():
        is_bytes = isinstance(tags[tag], bytes)
        entries += struct.pack(
            "<HHI", tag, 7 if is_bytes else 4, len(value) if is_bytes else len(value) // 4
        )
        entries += (
            value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<I", data_at + len(data))
        )
        data += value if len(value) > 4 else b""
    return (
        struct.pack("<2sHIH", b"II", 42, 8, len(values))
        + entries
        + bytes(4)
        + data
        + b"".join(strips)
    )


def tiff_strips(content: bytes) -> tuple[list[bytes], dict[int, list[int] | bytes]]:
    """The strips of a TIFF that Pillow wrote, and the tags that `tiff` needs to hold them again."""
    tags = Image.open(io.BytesIO(content)).tag_v2
    strips = [content[at : at + num] for at, num in zip(tags[273], tags[279], strict=True)]
    kept: dict[int, list[int] | bytes] = {}
    for tag in (258, 259, 262, 277, 278, 284, 292, 293, 317, 338, 347, 530):
        if tag in tags:
            value = tags[tag]
            kept[tag] = (
                value
                if isinstance(value, bytes)
                else list(value)
                if isinstance(value, tuple)
                else [value]
            )
    return strips, kept


def _short_tiff(image: np.ndarray | Image.Image, end: bytes = b"", **options) -> Short:
    strips, tags = tiff_strips(encode(image, "TIFF", **options))

    def short(share: float) -> bytes:
        if share == 1:
            return tiff(strips, tags)
        cut = max(1, int(share * len(strips))) - 1
        return tiff(
            [*strips[:cut], strips[cut][: int(len(strips[cut]) * share)] + end, *strips[cut + 1 :]],
            tags,
        )

    return short


def _short_strip() -> Short:
    strips = [RGB[top : top + ROWS].tobytes() for top in range(0, H, ROWS)]
    tags = {258: [8, 8, 8], 259: [1], 262: [2], 277: [3]}
    return lambda share: tiff(
        [strips[0], strips[1][: int(len(strips[1]) * share)], *strips[2:]], tags
    )


def _webp(image: np.ndarray, **options) -> Short:
    content = encode(image, "WEBP", **options)
    chunks: list[tuple[bytes, bytes]] = []
    place = 12
    while place < len(content):
        length = int.from_bytes(content[place + 4 : place + 8], "little")
        chunks.append((content[place : place + 4], content[place + 8 : place + 8 + length]))
        place += 8 + length + length % 2

    def short(share: float) -> bytes:
        body = b"WEBP"
        for kind, data in chunks:
            kept = data[: int(len(data) * share)] if kind in (b"VP8 ", b"VP8L") else data
            body += kind + struct.pack("<I", len(kept)) + kept + bytes(len(kept) % 2)
        return b"RIFF" + struct.pack("<I", len(body)) + body

    return short


def _gif(interlace: int, num_frames: int) -> Short:
    image = Image.fromarray(RGB).quantize(64)

    def short(share: float) -> bytes:
        height = int(H * share)
        first = image.crop((0, 0, W, height))
        later = []
        for i in range(num_frames - 1):
            changed = first.copy()
            changed.putpixel((0, 0), i + 1)
            later.append(changed)  # of which a GIF keeps only the pixel
        content = encode(first, "GIF", interlace=interlace, save_all=True, append_images=later)
        # of the screen, then of the first frame
        content = content[:8] + struct.pack("<H", H) + content[10:]
        return content.replace(
            struct.pack("<BHHHH", 0x2C, 0, 0, W, height), struct.pack("<BHHHH", 0x2C, 0, 0, W, H)
        )

    return short


def _bmp_rle() -> Short:
    image = Image.fromarray(RGB).quantize(64)
    colours = np.array(image.getpalette("RGB")[: 3 * 64], np.uint8).reshape(64, 3)[:, ::-1]
    palette = np.pad(colours, ((0, 0), (0, 1))).tobytes()
    rows = [
        b"".join(bytes([1, index]) for index in row) + b"\0\0" for row in np.asarray(image)[::-1]
    ]

    def short(share: float) -> bytes:
        data = b"".join(rows[: int(H * share)]) + b"\0\1"
        header = struct.pack(
            "<2sIIIIii", b"BM", 54 + len(palette) + len(data), 0, 54 + len(palette), 40, W, H
        )
        return header + struct.pack("<HHIIiiII", 1, 8, 1, len(data), 0, 0, 64, 0) + palette + data

    return short


def _bmp() -> Short:
    content = encode(RGB, "BMP")

    def short(share: float) -> bytes:
        kept = content[: 54 + int((len(content) - 54) * share)]
        return kept[:2] + struct.pack("<I", len(kept)) + kept[6:]

    return short


_GREY = RGB[..., 0]
_ALPHA = np.dstack([RGB, RGB[..., 0]])
_DEEP = (RGB * 256.0 + 3).astype(">u2")
_INK = Image.fromarray(RGB).convert("CMYK")

SHORT: dict[str, Short] = {
    "jpeg": _jpeg(),
    "jpeg 4:4:4": _jpeg(subsampling=0),
    "jpeg grey": _jpeg(_GREY),
    "jpeg cmyk": _jpeg(_INK),
    "jpeg progressive": _jpeg(progressive=True),
    "jpeg restarts": _jpeg(restart_marker_blocks=7),
    "jpeg with a harmless warning": _jpeg(extraneous=b"abc"),
    "jpeg progressive with a harmless warning": _jpeg(extraneous=b"abc", progressive=True),
    "jpeg restarts with a harmless warning": _jpeg(extraneous=b"abc", restart_marker_blocks=7),
    "jpeg cmyk with a harmless warning": _jpeg(_INK, extraneous=b"abc"),
    "png": _short_png(RGB, 8, 2),
    "png grey": _short_png(_GREY, 8, 0),
    "png palette": _short_png(_GREY, 8, 3),
    "png alpha": _short_png(_ALPHA, 8, 6),
    "png 16 bits": _short_png(_DEEP, 16, 2),
    "png grey 16 bits": _short_png(_DEEP[..., 0], 16, 0),
    "tiff short strip": _short_strip(),
    "tiff lzw": _short_tiff(RGB, compression="tiff_lzw"),
    "tiff deflate": _short_tiff(RGB, compression="tiff_adobe_deflate"),
    "tiff packbits": _short_tiff(RGB, compression="packbits"),
    "tiff jpeg": _short_tiff(RGB, b"\xff\xd9", compression="jpeg"),
    "tiff jpeg without its end": _short_tiff(RGB, compression="jpeg"),
    "webp": _webp(RGB),
    "webp lossless": _webp(RGB, lossless=True),
    "webp alpha": _webp(_ALPHA),
    "gif": _gif(0, 1),
    "gif interlaced": _gif(1, 1),
    "gif of two frames": _gif(0, 2),
    "bmp": _bmp(),
    "bmp rle": _bmp_rle(),
}
