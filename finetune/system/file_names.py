"""Names of files and folders as text, the same under every locale and on every file system."""

import os
import unicodedata


def text_of(name: str) -> str:
    """Return a file name as text.

    File names are bytes, here taken as UTF-8. Python decodes them by the locale, under which "straße" may be other
    letters or none. Bytes that are not UTF-8 become surrogates.
    """
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def composed(name: str) -> str:
    """Return a name in composed Unicode (NFC): macOS may write é as e and an accent (NFD), others as one letter."""
    return unicodedata.normalize("NFC", name)


def class_name(folder_name: str) -> str:
    """Return the class whose images lie in a folder of this name: the name as text, composed."""
    return composed(text_of(folder_name))
