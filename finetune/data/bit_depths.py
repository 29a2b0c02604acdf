"""Conversion of samples that are not 8 bits deep to uint8, by the depth that the file states."""

import io
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

# pixels converted at once, because a conversion holds several copies of them
_AT_ONCE = 2**24

# Possible full scales of 32-bit samples, whose files do not state one: fractions, 8, 16 and 32 bits.
_FULL_SCALES = (1, 2**8 - 1, 2**16 - 1, 2**32 - 1)
# full scales that a TIFF of 16-bit samples may state
_MAX_SAMPLES = {2**bits - 1 for bits in range(9, 16)}

# Tags of a TIFF.
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_MAX_SAMPLE_VALUE = 281
_SAMPLE_FORMAT = 339
# sample formats
_UNSIGNED = 1
_SIGNED = 2
_WHITE_IS_ZERO = 0


def rows_at_once(image: Image.Image) -> Iterator[tuple[int, int]]:
    """Yield (first row, end) of each strip of an image that is converted at once."""
    num_rows = max(1, _AT_ONCE // image.width)
    for top in range(0, image.height, num_rows):
        yield top, min(top + num_rows, image.height)


def bytes_of_samples(
    image: Image.Image, tags: Any
) -> Callable[[NDArray], NDArray[np.uint8]] | None:
    """Return a function that converts signed samples and those of 12 to 32 bits to uint8; None for other samples.

    Pillow's conversion would clip them at 0 and 255.

    Raises:
        ValueError: 32-bit samples are negative, so their scale is unknown.
    """
    bits = _first(tags.get(_BITS_PER_SAMPLE), 16)
    sample_format = _first(tags.get(_SAMPLE_FORMAT), _UNSIGNED)
    if sample_format == _SIGNED and image.mode == "L":
        # Pillow has read them as unsigned samples
        return lambda values: np.bitwise_xor(values, 128, dtype=np.uint8)
    if sample_format == _SIGNED and bits == 16:
        return lambda values: (values + 2**15 >> 8).astype(np.uint8)
    is_16_bit = image.mode.startswith("I;16")
    if not is_16_bit and image.mode not in ("I", "F"):
        return None
    # Pillow stores unsigned 32-bit samples as signed ones
    is_wrapped = image.mode == "I" and bits == 32 and sample_format == _UNSIGNED
    largest = 0.0
    if not is_16_bit or _MAX_SAMPLE_VALUE in tags:
        for top, bottom in rows_at_once(image):
            values = np.asarray(image.crop((0, top, image.width, bottom)))
            if is_wrapped:
                values = values.astype(np.uint32)
            if image.mode == "I" and values.min() < 0:
                raise ValueError(
                    "its samples of 32 bits are signed, and some are below zero: save it as unsigned ones"
                )
            largest = max(largest, float(_finite(values).max()))
    # Values up to twice a full scale still belong to it, because resampling may overshoot.
    full = next((full for full in _FULL_SCALES if largest <= 2 * full), largest)
    stated = _first(tags.get(_MAX_SAMPLE_VALUE), 0)
    depth = stated.bit_length() if stated in _MAX_SAMPLES and largest <= stated else bits

    def to_bytes(values: NDArray) -> NDArray[np.uint8]:
        if is_16_bit:
            grey = (values >> (depth - 8)).astype(np.uint8)
        else:
            numbers = _finite(values.astype(np.uint32) if is_wrapped else values)
            grey = (numbers.clip(0, full) / full * 255).round().astype(np.uint8)
        return 255 - grey if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else grey

    return to_bytes


def _finite(values: NDArray) -> NDArray[np.float32]:
    return np.nan_to_num(values.astype(np.float32), nan=0, posinf=0, neginf=0)


def _first(values: Any, default: int) -> int:
    """Return the first of a TIFF tag's values, one for each sample of a pixel."""
    value = values[0] if isinstance(values, tuple) and values else values
    return value if isinstance(value, int) else default


def use_native_order(image: ImageFile) -> None:
    """Make Pillow read signed and 32-bit samples of a compressed big-endian TIFF in native byte order.

    libtiff returns samples in the byte order of the machine. Pillow 12.3 handles this only for unsigned 16-bit samples.
    """
    if isinstance(image, TiffImageFile) and image.use_load_libtiff:
        codec, extents, offset, arguments = image.tile[0]
        assert isinstance(arguments, tuple)
        if arguments[0] in ("I;16BS", "I;32BS", "F;32BF"):
            arguments = (arguments[0].replace("B", "N"), *arguments[1:])
            image.tile = [type(image.tile[0])(codec, extents, offset, arguments)]


def stored_mode(image: ImageFile) -> str:
    """Return the raw mode of a PNG's pixels in Pillow; "" for other formats. Only its header must have been read."""
    return str(image.tile[0].args) if isinstance(image, PngImageFile) else ""


def scale_transparency(image: Image.Image, stored: str, file: BinaryIO) -> None:
    """Scale the transparent colour (tRNS) of a loaded PNG to the depth of its pixels.

    A PNG states this colour at the depth of the file. Pillow scales pixels of 2 and 4 bits to 8, and keeps the upper
    byte of 16-bit colours, but it does not convert the transparent colour. `decode` itself handles 16-bit grey.
    """
    colour = image.info.get("transparency")
    if colour is None:
        return
    if stored in ("L;2", "L;4"):
        full = 2 ** int(stored[2:]) - 1
        image.info["transparency"] = (colour & full) * 255 // full
    elif stored == "L":
        # "the least significant bits are used", says the specification
        image.info["transparency"] = colour & 255
    elif stored == "RGB":
        image.info["transparency"] = tuple(value & 255 for value in colour)
    elif stored == "RGB;16B":
        _compare_16_bits(image, colour, file)
        del image.info["transparency"]


def _compare_16_bits(image: Image.Image, colour: tuple[int, int, int], file: BinaryIO) -> None:
    """Add an alpha channel to an image of 16-bit colours: 0 if a pixel equals `colour`.

    Pillow has loaded the upper bytes. The lower bytes are read from the file, for an exact comparison.
    """
    file.seek(0)
    lower = PngImageFile(io.BytesIO(file.read()))
    codec, extents, offset, _ = lower.tile[0]
    # the lower byte of each sample
    lower.tile = [type(lower.tile[0])(codec, extents, offset, "RGB;16L")]
    lower.load()
    alpha = Image.new("L", image.size)
    for top, bottom in rows_at_once(image):
        box = (0, top, image.width, bottom)
        upper_is_equal = (np.asarray(image.crop(box)) == [value >> 8 for value in colour]).all(
            axis=2
        )
        lower_is_equal = (np.asarray(lower.crop(box)) == [value & 255 for value in colour]).all(
            axis=2
        )
        visible = np.where(upper_is_equal & lower_is_equal, 0, 255).astype(np.uint8)
        alpha.paste(Image.fromarray(visible), (0, top))
    image.putalpha(alpha)
