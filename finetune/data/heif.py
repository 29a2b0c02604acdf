"""HEIC and AVIF images. Pillow itself reads AVIF; for HEIC, pillow-heif is registered with it if it is installed."""

import importlib.util
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from finetune.system.messages import install

HEIC_SUFFIXES = (".heic", ".heif", ".hif")


def is_heif(head: bytes) -> bool:
    """Return whether a file may be HEIC or AVIF, by its first bytes. Videos begin in the same way."""
    return head[4:8] == b"ftyp"


def read_heif(file: BinaryIO) -> ImageFile:
    """Return a HEIC or AVIF image of which only the header is read.

    Raises:
        ValueError: The file is a video, or HEIC cannot be read here; the message says what to install.
    """
    _register()
    try:
        image = Image.open(file, formats=("AVIF", "HEIF"))
    except UnidentifiedImageError as error:
        if has_heic_reader():
            raise ValueError("it is a video, or a damaged HEIC or AVIF image") from error
        raise ValueError(
            f"it is a video, or a HEIC image, which needs pillow-heif: {install('heic')}"
        ) from error
    assert isinstance(image, ImageFile)
    return image


def heic_advice(suffixes: Iterable[str]) -> str:
    """Return the end of a message about skipped files: what to install if some are HEIC images; else ""."""
    if has_heic_reader() or not any(suffix in HEIC_SUFFIXES for suffix in suffixes):
        return ""
    return f"; to read HEIC images: {install('heic')}"


def has_heic_reader() -> bool:
    """Return whether pillow-heif is installed, without importing it."""
    return importlib.util.find_spec("pillow_heif") is not None


def heic_version(paths: Iterable[str]) -> str:
    """Return the version of pillow-heif, as `, pillow_heif 1.8.1`; "" if no path is a HEIC image."""
    if not has_heic_reader() or not any(path.lower().endswith(HEIC_SUFFIXES) for path in paths):
        return ""
    return f", pillow_heif {version('pillow_heif')}"


@cache
def _register() -> None:
    if has_heic_reader():
        importlib.import_module("pillow_heif").register_heif_opener()
