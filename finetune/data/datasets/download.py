"""Fetch an archive of images once: download, verify, extract and rename into place, or leave nothing behind."""

import os
import sys
import tempfile
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from finetune.system.files import one_at_a_time


def fetch_archive(url: str, sha1: str, target: str | os.PathLike[str]) -> Path:
    """Make a folder out of a zip on the web, unless something of that name is there already.

    The hash pins the archive, so that its content is trusted once it is verified. The work is done in a temporary
    folder next to the target and ends in one rename: the target is complete or absent, whatever happens. Only a killed
    process can leave the temporary folder. Of several processes one does the work, and the others wait.

    Args:
        url: Address of the zip, http or https.
        sha1: Its SHA-1 in hexadecimal.
        target: Folder to make. An existing one is returned as it is.

    Returns:
        The folder. If the archive holds one folder and nothing else, the content of that folder.

    Raises:
        OSError: If the network or the disk fails.
        ValueError: If the archive has another hash, or is damaged.
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
        # those of requests are OSErrors, too
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(failure.format(_reason(error))) from error
    return target


def _download(url: str, sha1: str, folder: Path) -> Path:
    import pooch  # brings requests: a quarter of a second that only a download should cost

    pooch.get_logger().setLevel("WARNING")  # it announces temporary names

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
    """Unpack a zip, and return the folder that holds its content."""
    content.mkdir()
    with zipfile.ZipFile(path) as archive:
        archive.extractall(content)
    entries = list(content.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else content


def _reason(error: BaseException) -> str:
    """The innermost cause on one line: requests wraps "Connection refused" three times."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner
        first = error.args[0] if error.args else None
        inner = error.__cause__ or (first if isinstance(first, BaseException) else None)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split()).rstrip(".")
