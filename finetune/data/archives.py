"""Archives of images (.tar, .tar.gz, .tgz, .zip), which are unpacked once, into the cache.

An archive may be hostile. Only plain files inside of its own folder are written, and a bomb is refused by its size.
"""

import gzip
import logging
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from finetune.data import bucket
from finetune.data.addresses import StorageError, is_address, real_place
from finetune.data.splits import SPLIT_NAMES
from finetune.system.cache_dir import COPIES, COPIES_MARK, cache_dir
from finetune.system.files import one_at_a_time, rename_folder
from finetune.system.messages import reason, shown
from finetune.system.process_folder import process_folder

log = logging.getLogger(__name__)

MOST_FILES = 2_000_000
# Images do not compress: an archive of them is nearly as large as they are.
_LARGEST_RATIO = 20
FREE_BYTES = 2**30  # bytes, which any archive may unpack to
_LONGEST_READ = 2**24  # bytes; a header in a tar file may claim any length
_BLOCK = 512  # bytes
_GZIP = b"\x1f\x8b"
_OF_MACOS = "__MACOSX"  # its zips have a second file for each image there
_DAMAGED = (
    ValueError,
    EOFError,
    RuntimeError,  # of an encrypted zip
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
)


class _Member(NamedTuple):
    """A member of an archive. `is_plain` is false for a link or a device."""

    name: str
    size: int
    is_plain: bool
    extract: Callable[[Path], Any]


def unpacked(place: str) -> str:
    """Return the folder in the cache with the content of an archive. The first call writes it, complete or not at all.

    One process does this; the others wait. If the archive holds a single folder, this is the folder that is returned.

    Args:
        place: Path of the archive, or its address in object storage.

    Raises:
        FileNotFoundError: The archive does not exist.
        ValueError: It is damaged, too large, or has links or paths that lead out of it.
        OSError: The disk is full, or the archive cannot be read.
        StorageError: Object storage cannot be reached.
    """
    version, e_tag = _version(place)
    key = f"{real_place(place)}\0{version}".encode(errors="surrogateescape")
    name = PurePosixPath(place).name[:100]
    folder = cache_dir() / COPIES / f"{name}-{blake2b(key, digest_size=8).hexdigest()}"
    if not folder.exists():
        with one_at_a_time(folder):
            if not folder.exists():
                log.info("unpacking %s once, into %s", place, folder)
                _unpack(place, e_tag, folder)
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    is_wrapped = len(entries) == 1 and entries[0].is_dir()
    if is_wrapped and entries[0].name.lower() not in SPLIT_NAMES:
        folder = entries[0]
    return str(folder)


def _version(place: str) -> tuple[str, str | None]:
    """Return a text that changes with the content of an archive, and its ETag, if it is at an address."""
    if is_address(place):
        item = bucket.head(place, is_start=True)
        if item is None:
            raise FileNotFoundError(f"the archive {place!r} does not exist")
        return str(item.version()), item.e_tag
    if not os.path.exists(place):
        raise FileNotFoundError(f"the archive {place!r} does not exist")
    status = os.stat(place)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}", None


def _unpack(place: str, e_tag: str | None, folder: Path) -> None:
    """Unpack an archive to a new folder, which appears when it is complete. For `e_tag` see `bucket.download`."""
    temporary = Path(tempfile.mkdtemp(dir=process_folder(folder.parent)))
    content = temporary / "content"
    try:
        content.mkdir()
        path = Path(place)
        if is_address(place):
            path = temporary / "archive"
            bucket.download(place, e_tag, path)
        limit = max(FREE_BYTES, _LARGEST_RATIO * path.stat().st_size)
        is_zip = place.lower().endswith(".zip")
        _extract(_zip_members(path) if is_zip else _tar_members(path, limit), limit, content)
        (content / COPIES_MARK).touch()
        rename_folder(content, folder)
    except StorageError:  # not a fault of the archive
        raise
    except _DAMAGED as error:
        raise ValueError(f"cannot unpack {place}: {shown(reason(error))}") from error
    except OSError as error:
        raise OSError(shown(f"cannot unpack {place}: {reason(error)}")) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract(members: Iterator[_Member], limit: int, folder: Path) -> None:
    """Write the members of an archive to a folder.

    Raises:
        ValueError: There are too many, they are too large, or one is no plain file in the archive.
    """
    num_bytes = 0
    for num_files, member in enumerate(members, 1):
        num_bytes += member.size
        if num_files > MOST_FILES:
            raise ValueError(f"it has more than {MOST_FILES:,} files")
        if num_bytes > limit:
            raise ValueError(_too_large(limit))
        parts = PurePosixPath(member.name).parts
        if not member.is_plain:
            raise ValueError(
                f"{member.name} is a link or a device: write the archive with the files themselves (tar --dereference "
                "--hard-dereference)"
            )
        if member.name.startswith("/") or ".." in parts:
            raise ValueError(f"{member.name} is a path that leads out of the archive")
        if _OF_MACOS not in parts[:1]:
            member.extract(folder)


def _too_large(limit: int) -> str:
    return (
        f"its files take more than {limit:,} bytes, far more than the archive: if they are images, unpack it by hand "
        "and pass the folder"
    )


class _BoundedReader:
    """A file for tarfile that ends a read of too many bytes, at once or in all."""

    def __init__(self, file: Any, limit: int) -> None:
        self._file = file
        self._limit = limit
        self._left = limit
        self.last = b""
        self.seek = file.seek
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        self._left -= size
        if size > _LONGEST_READ or self._left < 0:
            raise ValueError(_too_large(self._limit))
        self.last = self._file.read(size)
        return self.last


def _tar_members(path: Path, limit: int) -> Iterator[_Member]:
    with open(path, "rb") as raw:
        is_compressed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        file: Any = _BoundedReader(gzip.GzipFile(fileobj=raw) if is_compressed else raw, limit)
        with cast(Any, tarfile.open(fileobj=file, mode="r:")) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # or each takes a kilobyte until the end
                yield _Member(
                    member.name,
                    member.size,
                    member.isreg() or member.isdir(),
                    partial(archive.extract, member, filter="data"),
                )
            # tarfile takes a truncated or damaged header for the end
            if file.last != bytes(_BLOCK):
                raise ValueError("it is truncated or damaged: copy it again")
            while block := file.read(_BLOCK):  # gzip checks its sum at its end
                if block.strip(b"\0"):
                    raise ValueError(
                        "it has data after its end: unpack it by hand and pass the folder"
                    )


def _zip_members(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 of an archive by Windows
            yield _Member(
                info.filename,
                info.file_size,
                kind in (0, stat.S_IFREG, stat.S_IFDIR),
                partial(archive.extract, info),
            )
