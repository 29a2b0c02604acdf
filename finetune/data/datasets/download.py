"""Download an archive of images once: download, verify, extract, and rename. A failure leaves nothing behind."""

import os
import sys
import tempfile
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from textwrap import shorten
from typing import Any

from finetune.system.files import one_at_a_time

_LONGEST_REASON = 300  # characters


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
                _extract(archive, Path(folder) / "content").rename(target)
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        # errors of requests are OSErrors, too
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(failure.format(_reason(error))) from error
    return target


def _download(url: str, sha1: str, folder: Path) -> Path:
    import pooch  # imports requests, which takes a quarter of a second

    pooch.get_logger().setLevel("WARNING")  # it would log temporary file names

    def close_later(response: Any, **_: Any) -> None:
        # pooch does not close the connection of a download that fails
        responses.enter_context(response)

    with ExitStack() as responses:
        downloader = pooch.HTTPDownloader(
            progressbar=sys.stderr is not None and sys.stderr.isatty(),
            hooks={"response": close_later},
        )
        archive = pooch.retrieve(url, f"sha1:{sha1}", "archive.zip", folder, downloader=downloader)
    return Path(archive)


def _extract(path: Path, content: Path) -> Path:
    """Extract a zip, and return the folder that holds its content."""
    content.mkdir()
    with zipfile.ZipFile(path) as archive:
        archive.extractall(content)
    entries = list(content.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else content


def _reason(error: BaseException) -> str:
    """Return the innermost cause in one line. requests wraps "Connection refused" three times."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner
        first = error.args[0] if error.args else None
        inner = error.__cause__ or (first if isinstance(first, BaseException) else None)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    # zipfile quotes the header of a damaged file, which may be long
    return shorten(str(text), _LONGEST_REASON, placeholder=" …").rstrip(".")
