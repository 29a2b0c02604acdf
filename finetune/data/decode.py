"""The image decoder: any image file to 8-bit RGB pixels. Training, prediction and serving all use it.

Different decoders would give different pixels: they differ in channel order, EXIF rotation and transparency. Pillow
reads the files and refuses those that end too early. The pixels of a JPEG come from simplejpeg, which calls the same
libjpeg-turbo with fewer copies and is bit-identical (`benchmarks/speed/loading.py`). It also reports the warnings of
libjpeg, which Pillow drops: if data are missing before the end marker, libjpeg only warns, and the rest is grey. A PNG
or TIFF that states more rows than were written to it, and a JPEG that ends between two scans, are not recognised.
Colour profiles are ignored, as in the usual training sets. All functions may run in threads and in forked workers.
"""

import contextlib
import io
import math
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import PIL.WebPImagePlugin  # noqa: F401 - if a reader is missing, Image.open() imports all of them
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from finetune.data.addresses import StorageError
from finetune.data.heif import HEIC_SUFFIXES, has_heic_reader, heif_advice, heif_formats, is_heif
from finetune.data.image_files import open_file
from finetune.data.limits import MAX_BYTES, MAX_PIXELS, MAX_SCANS

IMAGE_SUFFIXES: frozenset[str] = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"}
)
IMAGE_KINDS = "JPEG, PNG, WebP, AVIF, BMP, TIFF or GIF"
if has_heic_reader():
    IMAGE_SUFFIXES |= frozenset(HEIC_SUFFIXES)
    IMAGE_KINDS = f"HEIC, {IMAGE_KINDS}"

NUM_HEAD_BYTES = 16  # from which the format of a file is known
_JPEG_START = b"\xff\xd8\xff"
_STARTS = (_JPEG_START, b"\x89PNG", b"RIFF", b"BM", b"II", b"MM", b"GIF8")
# Pillow's names of the other formats; no more are tried (EPS starts Ghostscript).
_FORMATS = ("PNG", "WEBP", "BMP", "TIFF", "GIF")

# line breaks and control characters, which are escaped so that a file name stays on one line
_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")

# JPEG markers (ITU-T T.81, table B.1)
_SOS = 0xDA  # start of a scan
_EOI = 0xD9  # end of the image
# A marker that is followed by a length, or the end marker. They are faster to search than all markers.
_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
# warnings of libjpeg
_INCOMPLETE = re.compile(r"premature end|instead of RST", re.IGNORECASE)
# Entropy-coded bytes without a marker. They are random, so that they decode to other pixels than missing data.
_FILLER = bytes(np.random.default_rng(0).integers(0, 255, 32, np.uint8))

# Tags of a TIFF.
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_MAX_SAMPLE_VALUE = 281
_TILE_WIDTH = 322
_TILE_HEIGHT = 323
_SAMPLE_FORMAT = 339
_WHITE_IS_ZERO = 0
_SIGNED = 2
# largest samples of 9 to 15 bits, stored in 16
_MAX_SAMPLES = {2**bits - 1 for bits in range(9, 16)}
# PNGs whose transparent colour Pillow compares with pixels that it has converted
_CONVERTED = ("L;2", "L;4", "I;16B", "RGB;16B")

_PILLOW_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)  # an entry of warnings.filters


class DecodeError(ValueError):
    """An image that cannot be decoded. The message is one line with the file and the `reason`."""

    reason = ""


@contextlib.contextmanager
def decoding(name: str) -> Iterator[None]:
    """Convert any error about an image into a `DecodeError`; errors of object storage are no faults of a file.

    Args:
        name: Name of the image, for the message.
    """
    silence_pillow()
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # for damaged files Pillow raises nearly any, such as KeyError
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        cause = " ".join(cause.split()) or type(error).__name__
        name = _BREAKS.sub(lambda match: ascii(match[0])[1:-1], name)
        converted = DecodeError(f"{name}: cannot be decoded: {cause}")
        converted.reason = cause
        raise converted from error


def decode(
    source: str | os.PathLike[str] | bytes,
    name: str | None = None,
    shorter_side: int | None = None,
    max_pixels: float = math.inf,
) -> NDArray[np.uint8]:
    """Decode an image to upright 8-bit RGB, with white in place of transparency.

    Of samples of 16 bits the upper 8 are used. Signed samples and those of other depths are an error. So is a PNG of 2,
    4 or 16 bits with a transparent colour.

    Only the first of several frames is read. A file that ends too early is an error, never padded, except for the few
    that are not recognised (see above).

    Memory: the size of the file plus at most 16 bytes per pixel, including the result; 2.9 GB for `MAX_PIXELS`.

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
    with decoding(name), _opened_source(source) as file:
        image = open_image(file, max_pixels)
        if shorter_side is None or min(image.size) <= shorter_side:
            return read_pixels(image, file)
        return _decode_smaller(image, file, shorter_side)


def _opened_source(source: str | os.PathLike[str] | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else open_file(source)


def stored_size(path: str) -> tuple[int, int]:
    """Return height and width from the header of an image, before EXIF rotation; (0, 0) if it cannot be read."""
    with contextlib.suppress(DecodeError), decoding(path), open_file(path) as file:
        width, height = open_image(file).size
        return height, width
    return 0, 0


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


def begins_like_image(content: bytes) -> bool:
    """Return whether a file begins like an image of a format that is read, by its first `NUM_HEAD_BYTES`."""
    return is_heif(content) or content.startswith(_STARTS)


def open_image(file: BinaryIO, max_pixels: float = math.inf) -> ImageFile:
    """Return an image of which only the header is read.

    Raises:
        ValueError: The format is unsupported, or the image is above a limit.
    """
    head = file.read(NUM_HEAD_BYTES)
    if not head:
        raise ValueError("the file is empty")
    if (num_bytes := file.seek(0, os.SEEK_END)) > MAX_BYTES:
        raise ValueError(f"{num_bytes:,} bytes are more than the limit of {MAX_BYTES:,}")
    if not begins_like_image(head):
        raise ValueError(f"not an image of {IMAGE_KINDS}: its first bytes are {head!r}")
    file.seek(0)
    image = _opened(file, head)
    _check_size(*image.size, max_pixels)
    if isinstance(image, TiffImageFile):
        tags: Any = image.tag_v2
        # a tile may be larger than the image
        _check_size(tags.get(_TILE_WIDTH, 0), tags.get(_TILE_HEIGHT, 0), max_pixels)
    return image


def _opened(file: BinaryIO, head: bytes) -> ImageFile:
    # Image.open() would take the photographs of some phones for an animation of two JPEGs.
    if head.startswith(_JPEG_START):
        return JpegImageFile(file)
    try:
        return Image.open(file, formats=heif_formats() if is_heif(head) else _FORMATS)
    except UnidentifiedImageError as error:
        advice = "its header is damaged, or has other than unsigned samples of 8 or 16 bits"
        raise ValueError(heif_advice() if is_heif(head) else advice) from error


def _check_size(width: int, height: int, max_pixels: float) -> None:
    limit = min(max_pixels, MAX_PIXELS)
    if width * height > limit:
        raise ValueError(f"{width} x {height} pixels are more than the limit of {limit:,.0f}")


def read_pixels(image: ImageFile, file: BinaryIO) -> NDArray[np.uint8]:
    """Return the pixels of an image from `open_image`, converted as in `decode`."""
    if isinstance(image, JpegImageFile):
        file.seek(0)
        pixels = _jpeg_pixels(image, file.read())
        if pixels is not None:
            return pixels
    _check_samples(image)
    if isinstance(image, PngImageFile):
        image.verify()  # by the checksums, which loading ignores; it cannot be loaded after that
        file.seek(0)
        image = PngImageFile(file)
    image.load()
    return _upright_rgb(image, is_owned=True)


def _jpeg_pixels(image: JpegImageFile, content: bytes) -> NDArray[np.uint8] | None:
    """Return the pixels of a grey or RGB JPEG; None for others, and those with a warning, which Pillow can read.

    Raises:
        ValueError: Data are missing, or the file has more than `MAX_SCANS` scans.
    """
    # A scan of 95 bytes may update all pixels, so decoding could take hours. Counting bytes is a fast first check.
    is_doubtful = content.count(bytes([0xFF, _SOS])) > MAX_SCANS
    if is_doubtful and sum(marker == _SOS for marker, _ in _segments(content)) > MAX_SCANS:
        raise ValueError(f"a JPEG of more than {MAX_SCANS} scans")
    is_draft = bool(image.decoderconfig) and image.decoderconfig[0] > 1
    width, height = image.size if is_draft else (0, 0)  # zeros: the original size
    colours = "CMYK" if image.mode == "CMYK" else "RGB"
    try:
        # raises a ValueError also for warnings
        pixels = simplejpeg.decode_jpeg(content, colours, min_height=height, min_width=width)
    except ValueError as error:
        if _INCOMPLETE.search(str(error)):
            raise ValueError(f"the file is truncated: {error}") from error
        _check_complete(content)
        return None
    if colours == "CMYK":
        return None
    with contextlib.suppress(Exception):  # as in `_upright_rgb`
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        if orientation != 1:
            upright = Image.fromarray(pixels)
            upright.getexif()[ExifTags.Base.Orientation] = orientation
            ImageOps.exif_transpose(upright, in_place=True)
            return np.array(upright)
    return pixels


def _segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield the marker of each segment of a JPEG up to its end marker, and the place of the marker."""
    place = 2
    while match := _SEGMENT.search(content, place):
        place = match.end()
        yield content[place - 1], match.start()
        if content[place - 1] == _EOI:
            return
        place += int.from_bytes(content[place : place + 2], "big")


def _check_complete(content: bytes) -> None:
    """Check that a JPEG with a warning lacks no data at its end. libjpeg reports its first warning only.

    Random bytes are added before the end marker. A decoder only reads them if data are missing; then pixels differ.

    Raises:
        ValueError: Data are missing.
    """
    *_, (marker, end) = _segments(content)
    if marker != _EOI:
        raise ValueError("the file is truncated: it has no end marker")
    # without a last byte of 255, which would make a marker of the filler
    filled = content[:end].rstrip(b"\xff") + _FILLER + content[end:]
    pixels, others = (np.asarray(JpegImageFile(io.BytesIO(one))) for one in (content, filled))
    if not np.array_equal(pixels, others):
        raise ValueError("the file is truncated: data are missing before its end marker")


def rgb_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels of an image that the caller opened, (H, W, 3), converted as in `decode`.

    Raises:
        Exception: Any, as for a file in `decode`.
    """
    _check_samples(image)
    image.load()
    return _upright_rgb(image, is_owned=False)


def _upright_rgb(image: Image.Image, is_owned: bool) -> NDArray[np.uint8]:
    # only TIFF states whether 0 is white
    tags: Any = getattr(image, "tag_v2", {})
    is_inverted = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    # Damaged metadata may raise any exception. The pixels are still valid.
    with contextlib.suppress(Exception):
        # In place it makes no copy and returns None.
        image = ImageOps.exif_transpose(image, in_place=is_owned) or image  # type: ignore[call-overload]
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        image = Image.fromarray(255 - grey if is_inverted else grey)
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
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
