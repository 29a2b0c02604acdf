"""Names of files and folders as text, the same under every locale and on every file system."""

import os
import unicodedata
from pathlib import PurePath


def text_of(path: PurePath) -> str:
    """Return the last part of a path as text.

    File names are bytes, here taken as UTF-8. Python decodes them by the locale, under which "straße" may be other
    letters or none. Bytes that are not UTF-8 become surrogates.
    """
    return os.fsencode(path.name).decode("utf-8", "surrogateescape")


def composed(name: str) -> str:
    """Return a name in composed Unicode (NFC): macOS may write é as e and an accent (NFD), others as one letter."""
    return unicodedata.normalize("NFC", name)


def class_name(folder: PurePath) -> str:
    """Return the class whose images lie in a folder: its name as text, composed."""
    return composed(text_of(folder))
