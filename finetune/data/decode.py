"""Any picture file to an array of 8-bit RGB pixels: the one decoder of training, prediction and serving.

Two decoders would be two data sets: they differ in the order of colours, in the EXIF rotation and in what they make of
transparency. Pillow does the reading and says what is wrong with a file. Only the pixels of a sound JPEG come from
simplejpeg, which calls the same libjpeg-turbo with fewer copies: bit-identical (see `benchmarks/data/loading.py`).
Colour profiles are ignored, as in the usual training sets. Everything here may run in threads and in forked workers.
"""

import contextlib
import io
import math
import os
import re
import warnings
from collections.abc import Callable
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

from finetune.data.bit_depths import (
    bytes_of_samples,
    rows_at_once,
    scale_transparency,
    stored_mode,
    use_native_order,
)
from finetune.data.completeness import check_coefficients, load
from finetune.data.limits import MAX_BYTES, MAX_PIXELS, check_scans
from finetune.data.storage import open_file

IMAGE_SUFFIXES: frozenset[str] = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"}
)

# The first bytes decide, not the suffix. The classes are called directly because Image.open() warns from 89 Mpx on,
# tries formats we do not want (EPS starts Ghostscript) and says only "cannot identify" about a damaged header.
READERS: dict[bytes, type[ImageFile]] = {
    b"\xff\xd8\xff": JpegImageFile,
    b"\x89PNG": PngImageFile,
    b"RIFF": WebPImageFile,
    b"BM": BmpImageFile,
    b"II": TiffImageFile,
    b"MM": TiffImageFile,
    b"GIF8": GifImageFile,
}

# in file names, of which each is to stay on a line
_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_PILLOW_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)  # an entry of warnings.filters


class DecodeError(ValueError):
    """A picture that cannot be decoded; the message is one line that names the file and what is wrong with it."""


def decode(
    source: str | os.PathLike[str] | bytes,
    name: str | None = None,
    shorter_side: int | None = None,
    max_pixels: float = math.inf,
) -> NDArray[np.uint8]:
    """Read a picture as a person would see it: upright, in RGB, on white paper where it is transparent.

    Of 16-bit samples the upper 8 bits are kept, of those that the file says it uses: by a TIFF's BitsPerSample, or its
    MaxSampleValue where that is a full scale such as 4095 and no sample is above. A PNG's samples fill their scale
    (its specification, sBIT). What is not stated is never guessed from the pixels: a dark picture stays dark. Signed
    samples of 8 and 16 bits are scaled by their range: the lowest is black, and zero is in the middle. 32-bit samples
    are divided by the full scale that fits their maximum; an error if integers are below zero. Of several frames the
    first is read. Half a picture is an error, never a grey rest (see `completeness`).

    Beside the file's own size that takes at most 14 bytes for each of `MAX_PIXELS`, 2.5 GB, the result among them.

    Args:
        source: Path of the picture, or the content of its file.
        name: What errors call the picture; by default its path.
        shorter_side: Make a larger picture smaller by averaging, to this many pixels on its shorter side. A JPEG is
            decoded at 1/2, 1/4 or 1/8 of its size where that leaves twice as many: faster, and on 200 photographs at
            28 to 60 pixels within 7 grey levels (mean absolute difference) of averaging the whole picture.
        max_pixels: A limit below `MAX_PIXELS`.

    Returns:
        Pixels of shape (H, W, 3), owned by the caller.

    Raises:
        DecodeError: If there is no such file, it may not be read, or is not a whole picture of at most `MAX_PIXELS`.
    """
    name = name or ("picture" if isinstance(source, bytes) else os.fspath(source))
    quiet()
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open_file(source) as file:
            image = read_header(file, max_pixels)
            if shorter_side is None or min(image.size) <= shorter_side:
                return read_pixels(image, file)[0]
            return _shrunk(image, file, shorter_side)
    except (
        Exception
    ) as error:  # damaged files make Pillow raise nearly every kind, struct.error and KeyError too
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = " ".join(reason.split()) or type(error).__name__
        name = _BREAKS.sub(lambda match: ascii(match[0])[1:-1], name)
        raise DecodeError(f"{name}: can't be decoded: {reason}") from error


def stored_size(path: str) -> tuple[int, int]:
    """Return height and width that the header of a picture states, before any rotation; (0, 0) if it can't be read."""
    quiet()
    with contextlib.suppress(Exception), open_file(path) as file:  # as in `decode`, which says why
        width, height = read_header(file).size
        return height, width
    return 0, 0


def _shrunk(image: ImageFile, file: BinaryIO, shorter_side: int) -> NDArray[np.uint8]:
    # with torch and OpenCV, which decoding as such does without
    from finetune.data.resize import resize

    # a fraction's own sides are rounded
    longer_side = round(max(image.size) * (shorter_side / min(image.size)))
    # for a JPEG; other formats know no fractions
    image.draft(None, (2 * shorter_side, 2 * shorter_side))
    picture, _ = read_pixels(image, file)
    return resize(
        picture, *sorted((shorter_side, longer_side), reverse=picture.shape[0] >= picture.shape[1])
    )


def _kind_of(head: bytes) -> str:
    """Return in words what a file is that begins with these bytes and is no image that we read."""
    if head[4:11] in (b"ftyphei", b"ftypmif", b"ftypavi"):  # what phones write
        return "it is HEIC or AVIF: save it as JPEG"
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
    """Return a picture of which nothing but the header is read; what it may not be is a ValueError."""
    head = file.read(16)
    if not head:
        raise ValueError("the file is empty")
    reader = next((reader for magic, reader in READERS.items() if head.startswith(magic)), None)
    if reader is None:
        raise ValueError(f"not a JPEG, PNG, WebP, BMP, TIFF or GIF picture ({_kind_of(head)})")
    if (num_bytes := file.seek(0, os.SEEK_END)) > MAX_BYTES:
        raise ValueError(f"{num_bytes:,} bytes are more than the limit of {MAX_BYTES:,}")
    file.seek(0)
    image = reader(file)  # reads the header only
    max_pixels = min(max_pixels, MAX_PIXELS)
    _check_size(*image.size, max_pixels)
    if isinstance(image, TiffImageFile):
        tags: Any = image.tag_v2
        # of a tile, which may be larger than the picture
        _check_size(tags.get(322, 0), tags.get(323, 0), max_pixels)
    return image


def _check_size(width: int, height: int, max_pixels: float) -> None:
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} pixels are more than the limit of {max_pixels:,.0f}")


def read_pixels(image: ImageFile, file: BinaryIO) -> tuple[NDArray[np.uint8], str]:
    """Return the pixels of an image after `read_header` as `decode` does, and the warning of `load`."""
    if image.format == "JPEG":
        check_scans(file)
    pixels = _jpeg_pixels(image, file)
    if pixels is not None:
        return pixels, ""
    use_native_order(image)
    stored = stored_mode(image)
    warning = load(image, file)
    scale_transparency(image, stored, file)
    return _upright_rgb(image, is_ours=True), warning


def _jpeg_pixels(image: ImageFile, file: BinaryIO) -> NDArray[np.uint8] | None:
    """Decode a sound JPEG in grey or colours; None for all else, some of which Pillow can read."""
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
        return None
    is_draft = bool(image.decoderconfig) and image.decoderconfig[0] > 1
    width, height = image.size if is_draft else (0, 0)  # zeros for the size as it is
    file.seek(0)
    content = file.read()
    try:
        check_coefficients(content)  # `load` says then what is missing
        # a warning is a ValueError
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
    """Return the pixels of an image that the caller has opened as `decode` does, (H, W, 3); the image is loaded."""
    if not isinstance(image, ImageFile) or not image.tile or not image.fp or image.tell():
        image.load()
        return _upright_rgb(image, is_ours=False)
    position = image.fp.tell()
    image.fp.seek(0)
    # loading closes the file of an image that was opened by its path
    file = io.BytesIO(image.fp.read())
    image.fp.seek(position)
    if isinstance(image, JpegImageFile):
        check_scans(file)
    use_native_order(image)
    stored = stored_mode(image)
    load(image, file)
    if stored and "transparency" in image.info:
        copy = image.copy()  # the caller's keeps its metadata
        scale_transparency(copy, stored, file)
        return _upright_rgb(copy, is_ours=True)
    return _upright_rgb(image, is_ours=False)


def _upright_rgb(image: Image.Image, is_ours: bool) -> NDArray[np.uint8]:
    # only TIFF states a depth below 16 and whether 0 is white
    tags: Any = getattr(image, "tag_v2", {})
    # damaged metadata (any kind of exception) is no reason to refuse good pixels
    with contextlib.suppress(Exception):
        # In place it takes no copy, and returns nothing.
        image = ImageOps.exif_transpose(image, in_place=is_ours) or image  # type: ignore[call-overload]
    to_bytes = bytes_of_samples(image, tags)
    strips = list(rows_at_once(image))
    if len(strips) == 1:
        return _rgb(image, to_bytes)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, bottom in strips:
        pixels[top:bottom] = _rgb(image.crop((0, top, image.width, bottom)), to_bytes)
    return pixels


def _rgb(
    image: Image.Image, to_bytes: Callable[[NDArray], NDArray[np.uint8]] | None
) -> NDArray[np.uint8]:
    if to_bytes is not None:
        values = np.asarray(image)
        transparent = image.info.get("transparency")
        image = Image.fromarray(to_bytes(values))
        if isinstance(transparent, int):  # of a PNG of 16 bits
            image.putalpha(
                Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))
            )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGB", image.size, "white")
        paper.paste(image, mask=image)
        image = paper
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def quiet() -> None:
    """Silence Pillow's warnings, which are about metadata and colours that do not matter here.

    The filter is added and never taken back: `catch_warnings` swaps the list of the whole process, so two threads could
    leave each other's filters behind. It is looked for first because an addition makes once-only warnings appear again.
    """
    if not warnings.filters or warnings.filters[0] != _PILLOW_FILTER:
        warnings.filterwarnings("ignore", module=_PILLOW_FILTER[3].pattern)
