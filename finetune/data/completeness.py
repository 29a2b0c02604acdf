"""Checks that a file holds all pixels of its image. Pillow fills missing pixels of some files with grey or black.

Pillow raises an error if a file ends too early. It does not if an end marker follows, or if a valid header states more
rows than there are. libjpeg and libtiff only warn then, and Pillow drops their warnings. GIF, WebP and BMP
need no check here, because Pillow refuses them if pixels are missing.

libjpeg does not report a JPEG that ends between two scans, so this module reads the headers of the scans. It does not
report missing data in arithmetic coding either, so such files are refused. Missing data of a TIFF with fax or old-style
JPEG strips, of tiles, and of an interlaced PNG are not recognised if an end marker follows.
"""

import io
import re
import zlib
from typing import Any, BinaryIO

import numpy as np
import simplejpeg
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from finetune.data.limits import EOI, SEGMENT, SOS

_AT_ONCE = 2**22  # pixels compared at once
_PIECE = 2**16  # bytes inflated at once
_MARKER = re.compile(rb"\xff+[^\x00\xff]")  # of a JPEG
# Markers that begin a frame (ITU-T T.81, table B.1).
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_ARITHMETIC = {0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_NUM_COEFFICIENTS = 64
_ALL_BITS = 16  # more than a coefficient has
_RESTARTS = range(0xD0, 0xD8)
_WITHOUT_LENGTH = {0x01, 0xD8, *_RESTARTS}
# Entropy-coded bytes without a marker. They are random, so that they decode to other pixels than missing data.
_FILLER = bytes(np.random.default_rng(0).integers(0, 255, 32, np.uint8))
# bytes per file: enough for a restart marker at each block of the largest image
_MAX_FILLER = 2**26

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a PNG, by colour type (its specification, 11.2.2)

# Tags of a TIFF.
_WIDTH = 256
_HEIGHT = 257
_BITS_PER_SAMPLE = 258
_COMPRESSION = 259
_STRIP_OFFSETS = 273
_SAMPLES_PER_PIXEL = 277
_ROWS_PER_STRIP = 278
_STRIP_BYTES = 279
_PLANAR = 284
_JPEG_TABLES = 347
_JPEG = 7  # a compression


class IncompleteError(ValueError):
    """A file that does not hold all pixels of its image."""


def load(image: ImageFile, file: BinaryIO) -> None:
    """Load the pixels of an image by Pillow, and check that all of them are there.

    Args:
        image: The image; only its header must have been read.
        file: Its file.

    Raises:
        IncompleteError: Pixels are missing.
    """
    if isinstance(image, JpegImageFile):
        file.seek(0)
        check_jpeg(file.read())
    if isinstance(image, PngImageFile | TiffImageFile):
        _check_offsets(image, file)
    if isinstance(image, TiffImageFile) and not image.use_load_libtiff:
        _check_strip_bytes(image)
    image.load()
    if isinstance(image, PngImageFile):
        _check_png(image, file)
    if isinstance(image, TiffImageFile):
        _check_tiff(image, file)


def check_jpeg(content: bytes) -> None:
    """Check that no scan of a JPEG ends before its last block, and that its scans carry all coefficients.

    libjpeg only reports its first warning, which may be harmless. If there is one, the file is decoded again with
    random filler after each scan and each restart interval. A decoder only reads the filler if data are missing. Then
    the pixels differ.

    Raises:
        IncompleteError: Data are missing.
    """
    check_coefficients(content)
    try:
        # at 1/8 of the size, which is fast
        simplejpeg.decode_jpeg(content, min_height=1, min_width=1)
        return
    except ValueError as error:
        warning = str(error)
    if "premature end" in warning.lower():
        raise IncompleteError(f"the file is truncated: {warning}")
    if _pixels_differ(
        JpegImageFile(io.BytesIO(content)), JpegImageFile(io.BytesIO(_filled(content)))
    ):
        raise IncompleteError(
            "the file is truncated or damaged: Corrupt JPEG data: premature end of data segment"
        )


def check_coefficients(content: bytes) -> None:
    """Check by the headers of a JPEG that its scans carry all bits of each coefficient of each component.

    A file may end between two scans, with an end marker. Its image is then coarse or lacks colours. Reading stops at
    the header of the last scan that is needed. A sequential JPEG usually has only one.

    Raises:
        IncompleteError: A scan is missing, or the file is arithmetic-coded.
    """
    # number of low bits that no scan has carried yet, per component and coefficient
    num_unknown: dict[int, list[int]] = {}
    is_progressive = False
    place = 2
    while found := SEGMENT.search(content, place):
        marker = content[found.end() - 1]
        place = found.end()
        if marker == EOI:
            break
        start = place + 2
        place += int.from_bytes(content[place:start], "big")
        if marker in _ARITHMETIC:
            raise IncompleteError(
                "it is an arithmetic-coded JPEG, in which missing data cannot be detected: convert it"
            )
        if marker in _FRAMES:
            is_progressive = marker in _PROGRESSIVE
            components = content[start + 6 : place : 3]
            num_unknown = {component: [_ALL_BITS] * _NUM_COEFFICIENTS for component in components}
        elif marker == SOS and place - start >= 6:
            for component in content[start + 1 : place - 3 : 2]:
                if not is_progressive:
                    num_unknown.pop(component, None)
                elif component in num_unknown:
                    first = content[place - 3]
                    last = content[place - 2]
                    low = content[place - 1] & 15
                    num_unknown[component][first : last + 1] = [low] * (last + 1 - first)
            if not any(map(any, num_unknown.values())):
                return
    if any(map(any, num_unknown.values())):
        raise IncompleteError("the file is truncated: some of its scans are missing")


def _pixels_differ(image: ImageFile, other: ImageFile) -> bool:
    image.load()  # an error of the original is the error of the file
    try:
        other.load()
    except OSError:
        return True
    width, height = image.size
    num_rows = max(1, _AT_ONCE // width)
    for top in range(0, height, num_rows):
        rows = [
            np.asarray(one.crop((0, top, width, min(top + num_rows, height))))
            for one in (image, other)
        ]
        if not np.array_equal(rows[0], rows[1]):
            return True
    return False


def _filled(content: bytes) -> bytes:
    """Return a JPEG with filler before each marker that ends entropy-coded data. Bytes after its end are dropped."""
    parts: list[bytes] = []
    is_scan = False
    place = 2
    num_filler = 0
    copied = 0
    while found := _MARKER.search(content, place):
        marker = content[found.end() - 1]
        place = found.end()
        if is_scan:
            parts += [content[copied : found.start()], _FILLER]
            copied = found.start()
            num_filler += len(_FILLER)
            if num_filler > _MAX_FILLER:
                raise IncompleteError(
                    "the file is damaged: it has more restart markers than blocks"
                )
        if marker == EOI:
            return b"".join([*parts, content[copied:place]])
        if marker not in _RESTARTS:
            is_scan = marker == SOS
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(content[place : place + 2], "big")
    return b"".join([*parts, content[copied:]])


def _check_offsets(image: ImageFile, file: BinaryIO) -> None:
    """Check that no strip or tile begins after the end of the file. Pillow would allocate memory up to its offset."""
    num_bytes = file.seek(0, io.SEEK_END)
    for i, tile in enumerate(image.tile):
        if tile.offset > num_bytes:
            raise IncompleteError(
                f"the file is truncated: part {i + 1} of its pixels begins at byte {tile.offset:,} of {num_bytes:,}"
            )


def _check_png(image: ImageFile, file: BinaryIO) -> None:
    """Check that a loaded PNG has all rows. Pillow leaves missing rows zero, and ignores the checksums of pixels."""
    _check_png_checksums(file)
    last_row = image.crop((0, image.height - 1, image.width, image.height))
    if image.info.get("interlace") or np.asarray(last_row).any():
        return
    file.seek(16)  # of the first chunk, which is IHDR
    header = file.read(13)
    bits = header[8] * _CHANNELS[header[9]]
    # the first byte of each row is its filter type
    needed = image.height * (1 + _ceil_div(image.width * bits, 8))
    num_bytes = _num_inflated(file, needed)
    if num_bytes < needed:
        raise IncompleteError(
            f"the file is truncated: it has {num_bytes:,} of {needed:,} bytes of pixels"
        )


def _check_png_checksums(file: BinaryIO) -> None:
    """Check the checksums of the IDAT chunks of a PNG. Zeros in place of lost data may decode to pixels."""
    file.seek(8)
    while len(start := file.read(8)) == 8:
        num_bytes = int.from_bytes(start[:4], "big")
        kind = start[4:]
        if kind != b"IDAT":
            if kind == b"IEND":
                return
            file.seek(num_bytes + 4, io.SEEK_CUR)
            continue
        checksum = zlib.crc32(kind)
        remaining = num_bytes
        while remaining and (piece := file.read(min(remaining, _PIECE))):
            remaining -= len(piece)
            checksum = zlib.crc32(piece, checksum)
        stated = file.read(4)
        if len(stated) == 4 and int.from_bytes(stated, "big") != checksum:
            raise IncompleteError("the file is damaged: a checksum of its pixels is wrong")


def _num_inflated(file: BinaryIO, most: int) -> int:
    """Return the inflated size of the IDAT chunks of a PNG in bytes. Counting stops at `most`."""
    inflate = zlib.decompressobj()
    num_bytes = 0
    has_data = False
    file.seek(8)
    while num_bytes < most and len(start := file.read(8)) == 8:
        remaining = int.from_bytes(start[:4], "big")
        if start[4:] == b"IDAT":
            has_data = True
            while remaining and (piece := file.read(min(remaining, _PIECE))):
                remaining -= len(piece)
                while piece and not inflate.eof:
                    num_bytes += len(inflate.decompress(piece, _PIECE))
                    piece = inflate.unconsumed_tail
        elif has_data:
            break
        file.seek(remaining + 4, io.SEEK_CUR)  # 4 bytes of checksum
    return num_bytes + len(inflate.flush())


def _check_strip_bytes(image: TiffImageFile) -> None:
    """Check that each uncompressed strip has the bytes of its rows. Pillow would read on into the next strip."""
    tags: Any = image.tag_v2
    offsets = tags.get(_STRIP_OFFSETS, ())
    counts = tags.get(_STRIP_BYTES, ())
    # the stated size of a single strip is often wrong
    if len(offsets) < 2 or len(counts) != len(offsets) or not all(counts):
        return
    bits = tags.get(_BITS_PER_SAMPLE, (1,))
    num_samples = 1 if tags.get(_PLANAR) == 2 else tags.get(_SAMPLES_PER_PIXEL, 1)
    bits_per_pixel = sum(bits) if len(bits) == num_samples else bits[0] * num_samples
    row_bytes = _ceil_div(tags[_WIDTH] * bits_per_pixel, 8)
    num_rows = min(tags.get(_ROWS_PER_STRIP, tags[_HEIGHT]), tags[_HEIGHT])
    num_strips = _ceil_div(tags[_HEIGHT], num_rows)  # of a layer
    for i, count in enumerate(counts):
        rows = min(num_rows, tags[_HEIGHT] - i % num_strips * num_rows)
        if count < rows * row_bytes:
            raise IncompleteError(
                f"the file is truncated: strip {i + 1} has {count:,} of {rows * row_bytes:,} bytes"
            )


def _ceil_div(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)


def _check_tiff(image: TiffImageFile, file: BinaryIO) -> None:
    """Check that each JPEG strip of a loaded TIFF is complete, because libtiff does not report missing data."""
    tags: Any = image.tag_v2
    if tags.get(_COMPRESSION) != _JPEG:
        return
    tables = tags.get(_JPEG_TABLES, b"")
    offsets = tags.get(_STRIP_OFFSETS, ())
    counts = tags.get(_STRIP_BYTES, ())
    for offset, count in zip(offsets, counts, strict=True):
        file.seek(offset)
        strip = file.read(count)
        # The tables are a separate JPEG stream with start and end markers.
        check_jpeg(tables[:-2] + strip[2:] if tables else strip)
