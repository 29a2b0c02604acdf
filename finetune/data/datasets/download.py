"""Download an archive of images once: download, verify, extract, and rename. A failure leaves nothing behind."""

import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from http.client import HTTPException
from pathlib import Path
from textwrap import shorten
from urllib.error import HTTPError
from urllib.request import urlopen

from rich.progress import Progress

from finetune.system.files import one_at_a_time, rename_folder
from finetune.system.progress import console

_LONGEST_REASON = 300  # characters
_TIMEOUT = 30.0  # seconds without a byte


def fetch_archive(url: str, sha1: str, target: str | os.PathLike[str]) -> Path:
    """Download a zip and extract it to a folder, unless the folder exists.

    The archive is verified by its hash, so its content is trusted. The work is done in a temporary folder next to the
    target and ends with a rename, so the target is always complete or absent. Only a killed process leaves the
    temporary folder behind. One process does the work; the others wait.

    Args:
        url: Address of the zip, http or https.
        sha1: SHA-1 of the zip in hexadecimal.
        target: Folder to create. An existing folder is returned unchanged.

    Returns:
        The folder. If the archive holds a single folder, the target is that folder.

    Raises:
        OSError: The network or the disk failed.
        ValueError: The archive has another hash, or is damaged.
    """
    target = Path(target)
    if target.exists():
        return target
    failure = f"{url} could not be fetched into {target}: {{}}. Download it by hand and unpack it to {target}"
    try:
        with (
            one_at_a_time(target),
            tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder,
        ):
            if not target.exists():
                archive = _download(url, sha1, Path(folder))
                rename_folder(_extract(archive, Path(folder) / "content"), target)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        raise OSError(failure.format(_reason(error))) from error
    except (ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(failure.format(_reason(error))) from error
    return target


def _download(url: str, sha1: str, folder: Path) -> Path:
    archive = folder / "archive.zip"
    screen = console()
    with (
        urlopen(url, timeout=_TIMEOUT) as response,
        Progress(console=screen, disable=not screen.is_terminal) as progress,
        open(archive, "wb") as file,
    ):
        num_bytes = int(response.headers.get("Content-Length", 0))
        shutil.copyfileobj(progress.wrap_file(response, num_bytes, description="download"), file)
    with open(archive, "rb") as file:
        found = hashlib.file_digest(file, "sha1").hexdigest()
    if found != sha1:
        raise ValueError(f"expected sha1 {sha1}, got {found}")
    return archive


def _extract(path: Path, content: Path) -> Path:
    """Extract a zip, and return the folder that holds its content."""
    content.mkdir()
    with zipfile.ZipFile(path) as archive:
        archive.extractall(content)
    entries = list(content.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else content


def _reason(error: BaseException) -> str:
    """Return the cause in one line. urllib wraps "Connection refused"."""
    cause = getattr(error, "reason", error)
    text = getattr(cause, "strerror", None) or str(error) or type(error).__name__
    # zipfile quotes the header of a damaged file, which may be long
    return shorten(str(text), _LONGEST_REASON, placeholder=" …").rstrip(".")
