"""Fetch an archive of pictures once: download, verify, extract and rename into place, or leave nothing behind."""

import os
import stat
import tempfile
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path, PureWindowsPath
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from finetune.system.files import one_at_a_time

# More than any set of pictures needs, and less than what file systems take (255 bytes a name, 4,096 a path).
_MAX_MEMBERS = 1_000_000
_MAX_NAME = 200
_MAX_DEPTH = 20


def fetch_archive(
    url: str,
    sha1: str,
    target: str | os.PathLike[str],
    max_bytes: int = 4 * 2**30,
    max_archive_bytes: int = 4 * 2**30,
) -> Path:
    """Make a folder out of a zip on the web, unless something of that name is there already.

    The work is done in a temporary folder beside the target and ends in one rename, so the target is whole or absent
    whatever happens; only a killed process can leave the temporary folder. Of several processes one does it, and the
    others wait.

    Args:
        url: Address of the zip, http or https.
        sha1: Its SHA-1 in hexadecimal.
        target: Folder to make. What exists there is returned untouched, wherever it came from.
        max_bytes: Most the unpacked files may take together.
        max_archive_bytes: Most the archive may take; a larger one is not fetched, or not to its end.

    Returns:
        The folder. If the archive holds one folder and nothing else, what is in that folder.

    Raises:
        OSError: If the network or the disk fails.
        ValueError: If the archive is not the expected one, is damaged or too large, or would write outside its folder.
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
                archive = _download(url, sha1, Path(folder), max_archive_bytes)
                _extract(archive, Path(folder) / "content", max_bytes).rename(target)
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        # those of requests are OSErrors, too
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(failure.format(_reason(error))) from error
    return target


def _download(url: str, sha1: str, folder: Path, max_bytes: int) -> Path:
    import pooch  # brings requests: a quarter of a second that only a download should cost

    pooch.get_logger().setLevel("WARNING")  # it announces temporary names
    console = Console(stderr=True)

    def look_at(response: Any, **_: Any) -> None:
        # pooch forgets to close the connection of a download that fails
        responses.enter_context(response)
        _check_size(int(response.headers.get("content-length", 0)), max_bytes)

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with (
        ExitStack() as responses,
        Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress,
    ):
        downloader = pooch.HTTPDownloader(
            progressbar=_Bar(progress, url.rsplit("/", 1)[-1], folder, max_bytes),
            chunk_size=2**16,
            hooks={"response": look_at},
        )
        return Path(
            pooch.retrieve(url, f"sha1:{sha1}", "archive.zip", folder, downloader=downloader)
        )


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ValueError(f"the archive takes more than {max_bytes:,} bytes")


class _Bar:
    """The progress bar pooch expects (it sets `total` from the response's header), drawn by rich.

    It also ends a download that is longer than the server said.
    """

    total = 0

    def __init__(self, progress: Progress, description: str, folder: Path, max_bytes: int):
        self.progress = progress
        self.folder = folder
        self.max_bytes = max_bytes
        self.task = progress.add_task(description, total=None)

    def update(self, num_bytes: int) -> None:
        # `num_bytes` is what pooch asked for; the server may send less at once.
        _check_size(sum(path.stat().st_size for path in self.folder.iterdir()), self.max_bytes)
        self.progress.update(self.task, total=self.total or None, advance=num_bytes)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        self.progress.stop_task(self.task)


def _extract(path: Path, content: Path, max_bytes: int) -> Path:
    """Unpack a zip after looking at every member; return the folder that holds what was in it."""
    with zipfile.ZipFile(path) as archive:
        num_bytes = 0
        if len(archive.infolist()) > _MAX_MEMBERS:
            raise ValueError(
                f"it has {len(archive.infolist()):,} members, more than {_MAX_MEMBERS:,}"
            )
        for member in archive.infolist():
            # Windows rules are the stricter ones: both slashes separate, and a drive may come first.
            name = PureWindowsPath(member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)  # 0 if the archive was not made on Unix
            if name.drive or name.root or ".." in name.parts:
                raise ValueError(f"its member {member.filename!r} would lie outside the folder")
            if len(name.parts) > _MAX_DEPTH or any(
                len(os.fsencode(part)) > _MAX_NAME for part in name.parts
            ):
                what = f"longer than {_MAX_NAME} bytes or nested deeper than {_MAX_DEPTH} folders"
                raise ValueError(f"its member '{member.filename[:40]}…' has a name {what}")
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ValueError(f"its member {member.filename!r} is a link or a device")
            if member.flag_bits & 1:
                raise ValueError(f"its member {member.filename!r} is encrypted")
            # not only a promise: zipfile reads no more than this from a member
            num_bytes += member.file_size
            if num_bytes > max_bytes:
                raise ValueError(
                    f"its files up to {member.filename!r} take more than {max_bytes:,} bytes"
                )
        content.mkdir()
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
