"""HEIC and AVIF images: which files they are, and their readers.

Pillow itself reads AVIF, from version 11.3 if it was built with libavif. HEIC needs pillow-heif, or pi-heif, which is
the same without an encoder. They are imported only to read the header of a HEIC file, and are not registered with
Pillow. libheif applies rotation and mirroring itself; the reader then sets the EXIF orientation to upright.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

from PIL.ImageFile import ImageFile

from finetune.system.messages import install

HEIC_SUFFIXES = (".heic", ".heif", ".hif")
_PACKAGES = ("pillow_heif", "pi_heif")
NUM_HEAD_BYTES = 64  # enough for the compatible brands
# Brands (ISO/IEC 23008-12, 10) of still images and of sequences.
_AVIF = (b"avif", b"avis")
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
_ANY_CODEC = (b"mif1", b"msf1")
_SEQUENCES = (b"avis", b"hevc", b"hevx", b"msf1")


def heif_kind(head: bytes) -> Literal["AVIF", "HEIC", ""]:
    """Return which of the two formats a file has by its first `NUM_HEAD_BYTES`; "" for another format."""
    if head[4:8] != b"ftyp":
        return ""
    brand = head[8:12]
    if brand in _AVIF or (brand in _ANY_CODEC and _has_brand(head, _AVIF)):
        return "AVIF"
    return "HEIC" if brand in (*_HEIC, *_ANY_CODEC) else ""


def is_sequence(head: bytes) -> bool:
    """Return whether a HEIC or AVIF file is a sequence of images, by its first bytes."""
    return heif_kind(head) != "" and head[8:12] in _SEQUENCES


def _has_brand(head: bytes, brands: Iterable[bytes]) -> bool:
    """Return whether one of `brands` is a compatible brand of a file."""
    end = min(int.from_bytes(head[:4], "big"), len(head))
    return any(head[place : place + 4] in brands for place in range(16, end - 3, 4))


def heif_reader(kind: Literal["AVIF", "HEIC"]) -> type[ImageFile]:
    """Return the reader of a format.

    Raises:
        ValueError: It is not installed; the message says what to install.
    """
    reader = _avif_reader() if kind == "AVIF" else _heic_reader()
    if reader is None:
        raise ValueError(f"it is {missing_reader(kind)}")
    return reader


def missing_reader(kind: Literal["AVIF", "HEIC"]) -> str:
    """Return what to do about images of a format whose reader is not installed."""
    if kind == "AVIF":
        return "AVIF, which needs a newer Pillow: pip install --upgrade pillow"
    return f"HEIC, which needs pillow-heif: {install('heic')}"


def heic_advice(suffixes: Iterable[str]) -> str:
    """Return the end of a message about skipped files: what to install if some are HEIC images; else ""."""
    if has_heic_reader() or not any(suffix in HEIC_SUFFIXES for suffix in suffixes):
        return ""
    return f"; to read HEIC images: {install('heic')}"


def readable_suffixes() -> frozenset[str]:
    """Return the suffixes of both formats that can be read here."""
    suffixes = set(HEIC_SUFFIXES if has_heic_reader() else ())
    if importlib.util.find_spec("PIL._avif") is not None:
        suffixes.add(".avif")
    return frozenset(suffixes)


def has_heic_reader() -> bool:
    """Return whether a package that reads HEIC is installed, without importing it."""
    return _heic_package() is not None


def _heic_package() -> str | None:
    """Return the name of the installed package that reads HEIC; None if there is none."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)


def heic_version(paths: Iterable[str]) -> str:
    """Return the package that reads HEIC, with its version, as `, pillow_heif 1.8.1`; "" if no path is a HEIC image."""
    if not any(path.lower().endswith(HEIC_SUFFIXES) for path in paths):
        return ""
    name = _heic_package()
    return "" if name is None else f", {name} {version(name)}"


@cache
def _heic_reader() -> type[ImageFile] | None:
    name = _heic_package()
    if name is None:
        return None
    package = importlib.import_module(name)
    package.options.DECODE_THREADS = 1  # images are already decoded in parallel
    reader: type[ImageFile] = package.HeifImageFile
    return reader


@cache
def _avif_reader() -> type[ImageFile] | None:
    if importlib.util.find_spec("PIL._avif") is None:
        return None
    plugin: Any = importlib.import_module("PIL.AvifImagePlugin")
    plugin.DEFAULT_MAX_THREADS = 1  # images are already decoded in parallel
    reader: type[ImageFile] = plugin.AvifImageFile
    return reader
