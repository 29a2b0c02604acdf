"""Image files of every format with seeded mutations, and the comparison of a reading with what must come out."""

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from image_files import encode
from PIL import Image
from short_files import FILES, RGB, cut, png_chunk

from finetune.data.checking.image_facts import inspect_image, small_copy
from finetune.data.decode import DecodeError, decode, stored_size

MAX_PIXELS = 2**22  # the limit of the readings here, so that bombs are small
MUTATIONS = (
    "truncated",
    "truncated with an end",
    "bits flipped",
    "block overwritten",
    "block removed",
    "header changed",
    "trailing data",
    "wrong suffix",
    "two files joined",
    "bomb",
    "empty",
)
# "same" pixels as the file without the mutation, "same or refused", "refused", or "any" complete pixels or refused
EXPECTED = {
    "truncated": "same or refused",
    "truncated with an end": "same or refused",
    "trailing data": "same",
    "wrong suffix": "same",
    "bomb": "refused",
    "empty": "refused",
}
_SUFFIXES = ("jpg", "png", "gif", "bmp", "tif", "webp", "avif", "txt")
_HEADER = 160  # bytes
_ZEROS = zlib.compress(bytes(2**22), 9)
_MANY_ZEROS = zlib.compress(bytes(2**24), 9)


def _others() -> dict[str, bytes]:
    """Return intact files of the formats of which `short_files` has none."""
    files = {
        "tiff 16 bits": encode(Image.fromarray((RGB[..., 0] * 256.0).astype(np.uint16)), "TIFF"),
    }
    if ".avif" in Image.registered_extensions():
        files["avif"] = encode(RGB, "AVIF")
    return files


ORIGINALS = FILES | _others()


@dataclass(frozen=True)
class Mutated:
    """A mutated file.

    Attributes:
        kind: Kind of the file, of `ORIGINALS`.
        mutation: One of `MUTATIONS`.
        content: Bytes of the file.
        suffix: Suffix of its name.
    """

    kind: str
    mutation: str
    content: bytes
    suffix: str


def mutation_of(number: int) -> str:
    """Return the mutation of the file of this number."""
    return MUTATIONS[number // len(ORIGINALS) % len(MUTATIONS)]


def mutated(number: int) -> Mutated:
    """Return the mutated file of this number, always the same: each kind in turn, with each mutation in turn."""
    rng = np.random.default_rng(number)
    kind = [*ORIGINALS][number % len(ORIGINALS)]
    mutation = mutation_of(number)
    suffix = kind.partition(" ")[0]
    if mutation == "wrong suffix":
        suffix = str(rng.choice(_SUFFIXES))
    return Mutated(kind, mutation, _content(kind, mutation, rng), suffix)


def _content(kind: str, mutation: str, rng: np.random.Generator) -> bytes:
    original = ORIGINALS[kind]
    place = int(rng.integers(len(original)))
    if mutation == "truncated":
        return original[:place]
    if mutation == "truncated with an end" and kind in FILES:
        return cut(kind, place, has_end=True)
    if mutation == "truncated with an end":
        return original[:place] + original[max(place, len(original) - 2) :]
    if mutation == "trailing data":
        return original + rng.bytes(rng.integers(1, 5000))
    if mutation == "two files joined":
        return original[:place] + ORIGINALS[str(rng.choice([*ORIGINALS]))][place:]
    if mutation == "bomb":
        return _bomb(rng)
    if mutation == "empty":
        return b""
    if mutation == "block removed":
        return original[:place] + original[place + int(rng.integers(1, 600)) :]
    return original if mutation == "wrong suffix" else _overwritten(original, mutation, rng)


def _overwritten(original: bytes, mutation: str, rng: np.random.Generator) -> bytes:
    values = np.frombuffer(original, np.uint8).copy()
    if mutation == "bits flipped":
        for place in rng.integers(len(values), size=rng.integers(1, 9)):
            values[place] ^= 1 << rng.integers(8)
    if mutation == "block overwritten":
        place = rng.integers(len(values))
        block = values[place : place + rng.integers(1, 600)]
        block[:] = (
            rng.integers(256, size=len(block)) if rng.random() < 0.5 else rng.choice([0, 255])
        )
    if mutation == "header changed":
        size = int(rng.choice([1, 2, 4]))
        for place in rng.integers(min(_HEADER, len(values) - size), size=rng.integers(1, 4)):
            values[place : place + size] = rng.choice([0, 255, rng.integers(256)])
    return values.tobytes()


def _bomb(rng: np.random.Generator) -> bytes:
    """Return a small file with more pixels than the limit."""
    width = int(rng.integers(MAX_PIXELS // 60_000 + 1, 60_000))
    height = MAX_PIXELS // width + int(rng.integers(1, 1000))
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    text = png_chunk(b"zTXt", b"comment\0\0" + _MANY_ZEROS)
    data = png_chunk(b"IDAT", _ZEROS)
    form = rng.integers(4)
    if form == 0:
        return b"\x89PNG\r\n\x1a\n" + header + text + data + png_chunk(b"IEND", b"")
    if form == 1:
        size = struct.pack("<HH", min(width, 65_535), min(height, 65_535))
        return b"GIF89a" + size + b"\0\0\0" + b"\x2c\0\0\0\0" + size + b"\0\2\2\x4c\1\0\x3b"
    if form == 2:
        sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 1, 0, 0, 0, 0, 2, 0)
        return b"BM" + struct.pack("<III", 70, 0, 62) + sizes + bytes(8) + bytes(8)
    # a JPEG with a scan for each 95 bytes
    content = encode(RGB, "JPEG", progressive=True)
    start = content.rindex(b"\xff\xda")
    return content[:start] + content[start:-2] * 120 + b"\xff\xd9"


def fault_of_reading(case: Mutated, folder: Path) -> str:
    """Read a file by all that reads images; return what is wrong with the result, "" for nothing."""
    path = folder / f"image.{case.suffix}"
    path.write_bytes(case.content)
    expected = EXPECTED.get(case.mutation, "any")
    pixels = None
    try:
        pixels = decode(path)
    except DecodeError as error:
        if isinstance(error.__cause__, MemoryError):
            return "it needs too much memory"
        if fault := _fault_of_line(str(error)):
            return fault
        if expected == "same":
            return f"refused: {error}"
    if pixels is not None:
        if expected == "refused":
            return "decoded"
        if fault := _fault_of_pixels(pixels, path):
            return fault
        if expected.startswith("same") and not np.array_equal(pixels, decode(ORIGINALS[case.kind])):
            return "decoded to other pixels"
    return _fault_of_other_readings(path, is_readable=pixels is not None)


def _fault_of_line(line: str) -> str:
    if len(line.splitlines()) != 1 or not line.partition("cannot be decoded: ")[2]:
        return f"not a clear line: {line!r}"
    return ""


def _fault_of_pixels(pixels: np.ndarray, path: Path) -> str:
    size = stored_size(str(path))
    if pixels.dtype != np.uint8 or pixels.shape not in ((*size, 3), (*size[::-1], 3)):
        return f"decoded to {pixels.dtype} of shape {pixels.shape}, the header says {size}"
    return ""


def _fault_of_other_readings(path: Path, is_readable: bool) -> str:
    """Return what a smaller copy and `finetune check` say otherwise than the decoder."""
    error = inspect_image(str(path)).errors[0]
    if is_readable == bool(error):
        return f"check says {error!r}, the decoder {'decodes' if is_readable else 'refuses'} it"
    if not is_readable and not _is_line(error):
        return f"check says {error!r}"
    if is_readable == (small_copy(str(path), 16) is None):
        return "the small copy of a report differs in whether the file is readable"
    try:
        smaller = decode(path, shorter_side=20)
    except DecodeError as error:
        return f"only the smaller copy is refused: {error}" if is_readable else ""
    if not is_readable:
        return "only the smaller copy is decoded"
    return "" if smaller.shape[2] == 3 and smaller.dtype == np.uint8 else f"shape {smaller.shape}"


def _is_line(text: str) -> bool:
    return len(text.splitlines()) == 1
