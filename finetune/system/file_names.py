"""Names of files and folders as text, the same on every file system."""

import unicodedata


def composed(name: str) -> str:
    """Return a name in composed Unicode (NFC): macOS may write é as e and an accent (NFD), others as one letter."""
    return unicodedata.normalize("NFC", name)
