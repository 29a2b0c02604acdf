"""HEIC and AVIF images. Pillow itself reads AVIF; for HEIC, pillow-heif is registered with it if it is installed."""

import importlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version

from finetune.system.messages import install

HEIC_SUFFIXES = (".heic", ".heif", ".hif")


def is_heif(head: bytes) -> bool:
    """Return whether a file may be HEIC or AVIF, by its first bytes. Videos begin in the same way."""
    return head[4:8] == b"ftyp"


@cache
def heif_formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that can be read here. Their readers are imported."""
    importlib.import_module("PIL.AvifImagePlugin")
    if not has_heic_reader():
        return ("AVIF",)
    importlib.import_module("pillow_heif").register_heif_opener()
    return ("AVIF", "HEIF")


def heif_advice() -> str:
    """Return what may be wrong with a file that begins like HEIC or AVIF, and cannot be read."""
    if has_heic_reader():
        return "it is a video, or a damaged HEIC or AVIF image"
    return f"it is a video, or a HEIC image, which needs pillow-heif: {install('heic')}"


def heic_advice(suffixes: Iterable[str]) -> str:
    """Return the end of a message about skipped files: what to install if some are HEIC images; else ""."""
    if has_heic_reader() or not any(suffix in HEIC_SUFFIXES for suffix in suffixes):
        return ""
    return f"; to read HEIC images: {install('heic')}"


def has_heic_reader() -> bool:
    """Return whether pillow-heif is installed, without importing it."""
    return importlib.util.find_spec("pillow_heif") is not None


def heic_version() -> str:
    """Return the version of pillow-heif, as `, pillow_heif 1.8.1`; "" if it is not installed."""
    return f", pillow_heif {version('pillow_heif')}" if has_heic_reader() else ""
