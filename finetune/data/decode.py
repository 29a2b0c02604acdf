"""The image decoder: any image file to 8-bit RGB pixels. Training, prediction and serving all use it.

Different decoders would give different pixels: they differ in channel order, EXIF rotation and transparency. Pillow
reads the files and reports what is wrong with them. The pixels of an intact JPEG come from simplejpeg, which calls the
same libjpeg-turbo with fewer copies and is bit-identical (see `benchmarks/data/loading.py`). Colour profiles are
ignored, as in the usual training sets. All functions may run in threads and in forked workers.
"""

import contextlib
import io
import math
import os
import re
import warnings
from typing import Any, BinaryIO

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from finetune.data.addresses import StorageError
from finetune.data.completeness import check_coefficients, load
from finetune.data.heif import HEIC_SUFFIXES, has_heic_reader, is_heif, read_heif
from finetune.data.limits import MAX_BYTES, MAX_PIXELS, check_scans
from finetune.data.storage import open_file

IMAGE_SUFFIXES: frozenset[str] = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"}
)
if has_heic_reader():
    IMAGE_SUFFIXES |= frozenset(HEIC_SUFFIXES)

NUM_HEAD_BYTES = 16  # from which the format of a file is known

# Readers by the first bytes of a file, not by its suffix. They are called directly because Image.open() warns from
# 89 Mpx on, tries unwanted formats (EPS starts Ghostscript), and only reports "cannot identify" for a damaged header.
READERS: dict[bytes, type[ImageFile]] = {
    b"\xff\xd8\xff": JpegImageFile,
    b"\x89PNG": PngImageFile,
    b"RIFF": WebPImageFile,
    b"BM": BmpImageFile,
    b"II": TiffImageFile,
    b"MM": TiffImageFile,
    b"GIF8": GifImageFile,
}

# line breaks and control characters, which are escaped so that a file name stays on one line
_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")

# pixels converted at once, because a conversion holds several copies of them
_AT_ONCE = 2**24

# Tags of a TIFF.
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_MAX_SAMPLE_VALUE = 281
_SAMPLE_FORMAT = 339
_WHITE_IS_ZERO = 0
_SIGNED = 2
# largest samples of 9 to 15 bits, stored in 16
_MAX_SAMPLES = {2**bits - 1 for bits in range(9, 16)}
# PNGs whose transparent colour Pillow compares with pixels that it has converted
_CONVERTED = ("L;2", "L;4", "I;16B", "RGB;16B")

_PILLOW_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)  # an entry of warnings.filters


class DecodeError(ValueError):
    """An image that cannot be decoded. The message is one line with the file and the reason."""


def decode(
    source: str | os.PathLike[str] | bytes,
    name: str | None = None,
    shorter_side: int | None = None,
    max_pixels: float = math.inf,
) -> NDArray[np.uint8]:
    """Decode an image to upright 8-bit RGB, with white in place of transparency.

    Of samples of 16 bits the upper 8 are used. Signed samples and those of other depths are an error. So is a PNG of 2,
    4 or 16 bits with a transparent colour.

    Only the first of several frames is read. A truncated file is an error, never padded (see `completeness`).

    Memory: the size of the file plus at most 14 bytes per pixel, including the result; 2.5 GB for `MAX_PIXELS`.

    Args:
        source: Path of the image, or the content of its file.
        name: Name of the image in errors; by default its path.
        shorter_side: Downscale a larger image by averaging to this many pixels on its shorter side. A JPEG is decoded
            at 1/2, 1/4 or 1/8 of its size if that leaves twice as many pixels. This is faster; on 200 photographs at 28
            to 60 pixels it is within 7 grey levels (mean absolute difference) of averaging the complete image.
        max_pixels: A limit below `MAX_PIXELS`.

    Returns:
        Pixels of shape (H, W, 3), owned by the caller.

    Raises:
        DecodeError: The file cannot be read, or is not a complete image within the limits.
        StorageError: Object storage cannot be reached.
    """
    name = name or ("image" if isinstance(source, bytes) else os.fspath(source))
    silence_pillow()
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open_file(source) as file:
            image = read_header(file, max_pixels)
            if shorter_side is None or min(image.size) <= shorter_side:
                return read_pixels(image, file)
            return _decode_smaller(image, file, shorter_side)
    except StorageError:  # not a fault of this file
        raise
    except Exception as error:  # for damaged files Pillow raises nearly any, such as KeyError
        raise decode_error(name, error) from error


def decode_error(name: str, error: Exception) -> DecodeError:
    """Return the error of a file that cannot be read or decoded.

    Args:
        name: Name of the image.
        error: The cause.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = " ".join(reason.split()) or type(error).__name__
    name = _BREAKS.sub(lambda match: ascii(match[0])[1:-1], name)
    return DecodeError(f"{name}: cannot be decoded: {reason}")


def stored_size(path: str) -> tuple[int, int]:
    """Return height and width from the header of an image, before EXIF rotation; (0, 0) if it cannot be read."""
    silence_pillow()
    try:
        with open_file(path) as file:
            width, height = read_header(file).size
    except StorageError:
        raise
    except Exception:  # any exception: see `decode`
        return 0, 0
    return height, width


def _decode_smaller(image: ImageFile, file: BinaryIO, shorter_side: int) -> NDArray[np.uint8]:
    # imports torch and OpenCV, which plain decoding does not need
    from finetune.data.resize import resize

    # from the original size, because the sides of a reduced image are rounded
    longer_side = round(max(image.size) * (shorter_side / min(image.size)))
    if isinstance(image, JpegImageFile):  # for a HEIC it would choose an embedded thumbnail
        image.draft(None, (2 * shorter_side, 2 * shorter_side))
    pixels = read_pixels(image, file)
    return resize(
        pixels, *sorted((shorter_side, longer_side), reverse=pixels.shape[0] >= pixels.shape[1])
    )


def _kind_of(head: bytes) -> str:
    """Return in words what a file is that begins with these bytes and is no image that we read."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype", b"<html", b"<head")):
        return "it is a web page, perhaps saved instead of the image"
    if start.startswith((b"<svg", b"<?xml")):
        return "it is SVG or XML: save it as PNG"
    if head.startswith(b"%PDF"):
        return "it is a PDF: save its page as PNG"
    if head.startswith(b"PK\x03\x04"):
        return "it is a ZIP archive or an office document"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        return "it is a text file"
    return f"unknown format, first bytes {head[:8].hex(' ')}"


def read_header(file: BinaryIO, max_pixels: float = math.inf) -> ImageFile:
    """Return an image of which only the header is read.

    Raises:
        ValueError: The format is unsupported, or the image is above a limit.
    """
    head = file.read(NUM_HEAD_BYTES)
    if not head:
        raise ValueError("the file is empty")
    if (num_bytes := file.seek(0, os.SEEK_END)) > MAX_BYTES:
        raise ValueError(f"{num_bytes:,} bytes are more than the limit of {MAX_BYTES:,}")
    file.seek(0)
    image = read_heif(file) if is_heif(head) else _reader_of(head)(file)  # reads the header only
    max_pixels = min(max_pixels, MAX_PIXELS)
    _check_size(*image.size, max_pixels)
    if isinstance(image, TiffImageFile):
        tags: Any = image.tag_v2
        # size of a tile, which may be larger than the image
        _check_size(tags.get(322, 0), tags.get(323, 0), max_pixels)
    return image


def _reader_of(head: bytes) -> type[ImageFile]:
    """Return the reader of a file by its first bytes.

    Raises:
        ValueError: There is none.
    """
    reader = next((reader for magic, reader in READERS.items() if head.startswith(magic)), None)
    if reader is None:
        raise ValueError(
            f"not a JPEG, PNG, WebP, AVIF, HEIC, BMP, TIFF or GIF image ({_kind_of(head)})"
        )
    return reader


def begins_like_image(content: bytes) -> bool:
    """Return whether a file begins like an image of a format that is read, by its first `NUM_HEAD_BYTES`."""
    return is_heif(content) or content.startswith(tuple(READERS))


def _check_size(width: int, height: int, max_pixels: float) -> None:
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} pixels are more than the limit of {max_pixels:,.0f}")


def read_pixels(image: ImageFile, file: BinaryIO) -> NDArray[np.uint8]:
    """Return the pixels of an image from `read_header`, converted as in `decode`."""
    if image.format == "JPEG":
        check_scans(file)
    pixels = _jpeg_pixels(image, file)
    if pixels is not None:
        return pixels
    _check_samples(image)
    load(image, file)
    return _upright_rgb(image, is_owned=True)


def _jpeg_pixels(image: ImageFile, file: BinaryIO) -> NDArray[np.uint8] | None:
    """Decode an intact grey or RGB JPEG by simplejpeg; None for all other files, some of which Pillow can read."""
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
        return None
    is_draft = bool(image.decoderconfig) and image.decoderconfig[0] > 1
    width, height = image.size if is_draft else (0, 0)  # zeros: the original size
    file.seek(0)
    content = file.read()
    try:
        check_coefficients(content)  # if it fails, `load` reports the reason
        # raises a ValueError also for warnings
        pixels = simplejpeg.decode_jpeg(content, min_height=height, min_width=width)
    except ValueError:
        return None
    with contextlib.suppress(Exception):  # as in `_upright_rgb`
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        if orientation != 1:
            upright = Image.fromarray(pixels)
            upright.getexif()[ExifTags.Base.Orientation] = orientation
            ImageOps.exif_transpose(upright, in_place=True)
            return np.array(upright)
    return pixels


def rgb_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels of an image that the caller opened, (H, W, 3), converted as in `decode`. Loads the image."""
    _check_samples(image)
    if not isinstance(image, ImageFile) or not image.tile or not image.fp or image.tell():
        image.load()
        return _upright_rgb(image, is_owned=False)
    position = image.fp.tell()
    image.fp.seek(0)
    # a copy, because loading closes the file of an image that was opened by its path
    file = io.BytesIO(image.fp.read())
    image.fp.seek(position)
    if isinstance(image, JpegImageFile):
        check_scans(file)
    load(image, file)
    return _upright_rgb(image, is_owned=False)


def _upright_rgb(image: Image.Image, is_owned: bool) -> NDArray[np.uint8]:
    # only TIFF states whether 0 is white
    tags: Any = getattr(image, "tag_v2", {})
    is_inverted = image.mode.startswith("I;16") and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    # Damaged metadata may raise any exception. The pixels are still valid.
    with contextlib.suppress(Exception):
        # In place it makes no copy and returns None.
        image = ImageOps.exif_transpose(image, in_place=is_owned) or image  # type: ignore[call-overload]
    num_rows = max(1, _AT_ONCE // image.width)
    if num_rows >= image.height:
        return _rgb(image, is_inverted)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, num_rows):
        bottom = min(top + num_rows, image.height)
        pixels[top:bottom] = _rgb(image.crop((0, top, image.width, bottom)), is_inverted)
    return pixels


def _rgb(image: Image.Image, is_inverted: bool) -> NDArray[np.uint8]:
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        image = Image.fromarray(255 - grey if is_inverted else grey)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGB", image.size, "white")
        paper.paste(image, mask=image)
        image = paper
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _check_samples(image: Image.Image) -> None:
    """Check by the header that the samples of an image have 8 bits, or that their upper 8 of 16 are their value.

    Raises:
        ValueError: They have other values, for example signed ones.
    """
    stored = image.tile[0].args if isinstance(image, PngImageFile) and image.tile else ""
    if stored in _CONVERTED and "transparency" in image.info:
        raise ValueError(
            "a PNG of 2, 4 or 16 bits with a transparent colour: save it with 8 bits or an alpha channel"
        )
    tags: Any = getattr(image, "tag_v2", {})
    is_deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    bits = _first(tags.get(_BITS_PER_SAMPLE, 16)) if is_deep else 8
    is_signed = _first(tags.get(_SAMPLE_FORMAT, 1)) == _SIGNED
    if image.mode in ("I", "F") or is_signed or bits not in (8, 16):
        raise ValueError(
            "its samples are signed, or do not have 8 or 16 bits: save it with unsigned samples of 8 or 16 bits"
        )
    if is_deep and (stated := _first(tags.get(_MAX_SAMPLE_VALUE, 0))) in _MAX_SAMPLES:
        raise ValueError(
            f"its samples of 16 bits go up to {stated} only: save it with samples of 8 bits, or scaled to 65535"
        )


def _first(values: Any) -> Any:
    """Return the first of a TIFF tag's values, one for each sample of a pixel."""
    return values[0] if isinstance(values, tuple) and values else values


def silence_pillow() -> None:
    """Silence Pillow's warnings about metadata and colours, which do not matter here.

    The filter is added permanently. `catch_warnings` replaces the filters of the process, so two threads could restore
    each other's. The filter is only added if it is missing, because adding one shows once-only warnings again.
    """
    if not warnings.filters or warnings.filters[0] != _PILLOW_FILTER:
        warnings.filterwarnings("ignore", module=_PILLOW_FILTER[3].pattern)
