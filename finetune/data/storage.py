"""Storage of images: listing folders, stats of files, and opening them.

There are five kinds:

- `LocalStorage`, for paths.
- `object_storage.ObjectStorage`, for addresses such as s3://bucket/folder.
- `hub_storage.HubStorage`, for datasets of the Hugging Face hub.
- `web_storage.WebStorage`, for images on a web server.
- `packed_storage.PackedStorage`, for the images in a packed folder, on a disk or at an address.

All but the first are imported when they are needed. Another kind is a class with the methods of `Storage` and an entry
in `STORAGES`. All other modules use a path as text and ask `storage_of` for its storage.
"""

import hashlib
import importlib
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np

from finetune.data.addresses import check_address, is_address, parse_address, real_place
from finetune.data.pack_place import is_pack, pack_above

_UNKNOWN = -1
# Images in one block of a shard are read together. Reading a block takes 10 ms at 100 MB/s, about the latency of a
# request, so larger blocks would save little.
BLOCK_BYTES = 2**20

# "link" is a dangling link, "other" for example a pipe; None if there is nothing
Kind = Literal["folder", "file", "link", "other"] | None
# From the size of a file to the places where pieces of it start.
Starts = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class FileStats:
    """Sizes and times of N files.

    Attributes:
        sizes: Size of each file in bytes, (N,) int64; -1 if it does not exist.
        times: Two times of each file that change with its content, (N, 2) int64; -1 if it does not exist. Those of a
            local file are `st_mtime_ns` and `st_ctime_ns`.
        is_regular: Whether it is a regular file, not a folder or a pipe, (N,) bool.
    """

    sizes: np.ndarray
    times: np.ndarray
    is_regular: np.ndarray

    def take(self, rows: np.ndarray) -> "FileStats":
        """Return the stats of the files at `rows`, in that order."""
        return FileStats(self.sizes[rows], self.times[rows], self.is_regular[rows])


def block_number(begin: Any) -> Any:
    """Return the number of the block of a shard in which an image begins.

    Args:
        begin: Place of its first byte; of several images as an array (N,), whose numbers are also (N,).
    """
    return begin // BLOCK_BYTES


class Place(NamedTuple):
    """Where the bytes of an image are in a shard.

    Attributes:
        shard: Path of the shard.
        begin: Place of the first byte.
        end: Place after the last byte.
    """

    shard: str
    begin: int
    end: int

    @property
    def block(self) -> tuple[str, int]:
        """The block of the shard in which the image begins."""
        return self.shard, block_number(self.begin)


class Entry(NamedTuple):
    """A file or folder in a folder. `is_folder` is also true for a link to a folder."""

    name: str
    path: str
    is_folder: bool
    is_link: bool


class Storage(Protocol):
    """A place of files. Paths are text, with / between their parts. It is used in threads.

    Forked workers use only `LocalStorage`, and packed folders on a disk. They get the content of other files from the
    main process.
    """

    def refresh(self, folder: str) -> None:
        """Forget what is known of a folder. Object storage lists it again, with all subfolders."""

    def normal(self, path: str) -> str:
        """Return a path in the form that messages and the paths of `entries` have, without redundant parts."""

    def absolute(self, path: str) -> str:
        """Return a path that does not depend on the working directory."""

    def resolved(self, path: str) -> str:
        """Return the absolute path without links, which is the same for all names of one place."""

    def kind(self, path: str) -> Kind:
        """Return what is at a path."""

    def entries(self, folder: str) -> Iterator[Entry]:
        """Yield the files and folders in a folder, in any order.

        Raises:
            OSError: The folder cannot be read.
        """

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        """Return the stats of files; see `file_stats`. Listing their folders may be faster than asking for each."""

    def open_file(self, path: str) -> BinaryIO:
        """Open a file for reading; see `open_file` below."""

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        """Return the size of a file and pieces of it; see `read_pieces` below."""

    def results(self, path: str) -> dict[str, Any] | None:
        """Return a dict in which results about the content of a file are cached; None if they must not be.

        It is emptied when the folder is listed again. Results are not cached if reading the file is cheap, or if it
        may have changed since.
        """

    def commit(self, path: str) -> str:
        """Return the commit at which the files of a folder are read; "" if the place has none."""


class Pack(Storage, Protocol):
    """A packed folder."""

    def place(self, path: str) -> Place | None:
        """Return where an image is; None if the folder has no such image."""

    def blocks(self, paths: Sequence[str]) -> np.ndarray:
        """Return a number for the block of each image, (N,) int64, in the order of the shards.

        Raises:
            FileNotFoundError: The folder has no such image.
        """

    def contents(self, paths: Sequence[str]) -> list[bytes]:
        """Return the bytes of images in one shard. They are read in one piece, from the first to the last byte.

        Args:
            paths: The images, in the order of their places.

        Raises:
            StorageError: The shard cannot be read, or the bytes are not those that were packed.
        """


class LocalStorage:
    """Files of this machine, and of disks that are mounted.

    Args:
        finds_packs: Whether missing files are looked up in packed folders.
    """

    def __init__(self, finds_packs: bool = True) -> None:
        self._finds_packs = finds_packs

    def _find_pack(self, path: str) -> Pack | None:
        """Return the storage of the packed folder on the disk that a missing file is in, if there is one."""
        folder = _cached_pack_above(os.path.dirname(path)) if self._finds_packs else None
        return None if folder is None else _use_pack(folder)

    def refresh(self, folder: str) -> None:
        pass

    def normal(self, path: str) -> str:
        text = str(Path(path))
        # the paths of its images would not begin with "."
        return os.getcwd() if text == "." and is_pack(text) else text

    def absolute(self, path: str) -> str:
        return os.path.abspath(path)

    def resolved(self, path: str) -> str:
        return os.path.realpath(path)

    def kind(self, path: str) -> Kind:
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):  # ValueError: a zero byte
            if os.path.islink(path):
                return "link"
            pack = self._find_pack(path)
            return None if pack is None else pack.kind(path)
        if stat.S_ISDIR(mode):
            return "folder"
        return "file" if stat.S_ISREG(mode) else "other"

    def entries(self, folder: str) -> Iterator[Entry]:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link to itself, which is reported when it is read
                    is_folder = False
                yield Entry(entry.name, entry.path, is_folder, entry.is_symlink())

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        sizes = array("q")
        times = array("q")
        is_regular = array("b")
        for path in paths:
            size, both_times, regular = self._status(path, skip)
            sizes.append(size)
            times.extend(both_times)
            is_regular.append(regular)
        return FileStats(
            np.array(sizes, np.int64),
            np.array(times, np.int64).reshape(-1, 2),
            np.array(is_regular, bool),
        )

    def _status(self, path: str, skip: bool) -> tuple[int, tuple[int, ...], bool]:
        """Return the size of a file, its two times, and whether it is a regular file; see `FileStats`."""
        try:
            status = os.stat(path)
        except OSError as error:
            pack = self._find_pack(path)
            if pack is not None:
                packed = pack.stats([path], skip)
                return int(packed.sizes[0]), tuple(packed.times[0]), bool(packed.is_regular[0])
            if not skip:
                raise _explained(error, path) from None
            return _UNKNOWN, (_UNKNOWN, _UNKNOWN), False
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return status.st_size, times, stat.S_ISREG(status.st_mode)

    def open_file(self, path: str) -> BinaryIO:
        try:
            file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 the caller closes it
        except (FileNotFoundError, NotADirectoryError) as error:
            pack = self._find_pack(path)
            if pack is None:
                raise _explained(error, path) from None
            return pack.open_file(path)
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ValueError("it is a pipe, not a file")
        return file

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        try:
            descriptor = _open_at_once(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            pack = self._find_pack(path)
            if pack is None:
                raise _explained(error, path) from None
            return pack.read_pieces(path, num_bytes, starts)
        try:
            size = os.fstat(descriptor).st_size
            return size, [os.pread(descriptor, num_bytes, start) for start in starts(size)]
        finally:
            os.close(descriptor)

    def results(self, path: str) -> None:
        return None

    def commit(self, path: str) -> str:
        return ""


def _explained(error: OSError, path: str) -> OSError:
    """Return the error of a file that cannot be opened, which names a dangling link as such."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return FileNotFoundError(error.errno, "The target of this link does not exist", path)
    return error


def _open_at_once(path: str, flags: int) -> int:
    # reading a pipe would otherwise block until it is written to
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


LOCAL = LocalStorage()
# By the scheme of their paths, such as s3. They are added when they are first used.
STORAGES: dict[str, Storage] = {}
# The module and the class of the schemes that are not those of object storage.
_CLASSES = {
    "hf": ("hub_storage", "HubStorage"),
    "https": ("web_storage", "WebStorage"),
    "http": ("web_storage", "WebStorage"),
}
# The packed folders that are in use, by the beginning of their paths.
PACKS: dict[str, Pack] = {}


def storage_of(path: str) -> Storage:
    """Return the storage of a path: that of the packed folder it is in, or else that of its scheme.

    Raises:
        WrongUsage: The path is an address, and the extra for its storage is not installed.
    """
    return pack_of(path) or _storage_of_files(path)


def pack_of(path: str) -> Pack | None:
    """Return the packed folder in use that a path is in, or that it is; None if there is none."""
    for folder, pack in PACKS.items():
        inside = path[len(folder) :]
        if path.startswith(folder) and inside[:1] in ("", "/") and inside[:4] != "/../":
            return pack
    return None


def _storage_of_files(path: str) -> Storage:
    """Return the storage of a path, by its scheme."""
    scheme, separator, _ = path.partition("://")
    if not separator:
        return LOCAL
    if scheme not in STORAGES and is_address(path):
        check_address(path)
        # imported here, because fits on local folders do not need obstore
        module, name = _CLASSES.get(scheme, ("object_storage", "ObjectStorage"))
        STORAGES[scheme] = getattr(importlib.import_module(f"finetune.data.{module}"), name)()
    return STORAGES.get(scheme, LOCAL)


def is_local(path: str) -> bool:
    """Return whether a file is on a disk of this machine, so that any process may open it."""
    return "://" not in path or storage_of(path) is LOCAL


@lru_cache(maxsize=16)
def _cached_pack_above(folder: str) -> str | None:
    """Return `pack_above` of a folder. Cached, because each missing file of the folder needs it."""
    try:
        return pack_above(folder)
    except ValueError:  # a zero byte
        return None


def _use_pack(folder: str) -> Pack:
    """Return the storage of a packed folder, and read its index at the first use."""
    if folder not in PACKS:
        # imported here, because it imports this module
        module = importlib.import_module("finetune.data.packed_storage")
        files = _storage_of_files(folder)
        backing = LocalStorage(finds_packs=False) if files is LOCAL else files
        PACKS[folder] = module.PackedStorage(folder, backing)
    return PACKS[folder]


def refresh(folder: str | os.PathLike[str]) -> None:
    """Discard what is cached about a folder, before its images are searched for.

    Raises:
        StorageError: It is a packed folder with a fault, or object storage cannot be reached.
    """
    text = os.fspath(folder)
    storage = storage_of(text)
    storage.refresh(text)
    _cached_pack_above.cache_clear()
    if storage in PACKS.values():
        return
    place = _cached_pack_above(text) if storage is LOCAL else _pack_above_address(storage, text)
    if place is not None:
        _use_pack(place)


def _pack_above_address(storage: Storage, path: str) -> str | None:
    """Return the packed folder of an address: the folder itself, or one that contains it. None if there is none."""
    address = storage.normal(path)
    places = [address]
    if storage.kind(address) is None:  # perhaps an image or a folder in a packed one
        places += [str(place) for place in parse_address(address).parents()]
    packs = (place for place in places if is_pack(place, lambda path: storage.kind(path) == "file"))
    return next(packs, None)


def normal_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text without redundant parts."""
    text = os.fspath(path)
    return storage_of(text).normal(text)


def kind_of(path: str) -> Kind:
    """Return what is at a path."""
    return storage_of(path).kind(path)


def is_same_place(first: str, second: str) -> bool:
    """Return whether two paths are names of the same place."""
    return _resolved(first) == _resolved(second)


def _resolved(path: str) -> str:
    # of a checkpoint, perhaps, whose address is compared but not used
    return real_place(path) if is_address(path) else storage_of(path).resolved(path)


def file_stats(paths: Sequence[str], skip: bool = True) -> FileStats:
    """Return the sizes and times of files.

    Args:
        paths: The files, N.
        skip: Store -1 for a file that does not exist, which is reported when it is read. Otherwise raise.

    Raises:
        OSError: A file does not exist, and `skip` is false.
    """
    if not len(paths):
        return LOCAL.stats(paths, skip)
    parts = groupby(paths, storage_of)
    return concatenate_stats([storage.stats(list(part), skip) for storage, part in parts])


def concatenate_stats(parts: Sequence[FileStats]) -> FileStats:
    """Return the stats of all parts, in their order."""
    return FileStats(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.is_regular for part in parts]),
    )


def files_digest(paths: Sequence[str], stats: FileStats, root: str | os.PathLike[str]) -> str:
    """Return a hash of the relative path, size and change times of every file, in this order.

    Programs can set `st_mtime`, and copying may preserve it. The file system sets `st_ctime` at every change of
    content, name or permissions, and not when a file is read. So a replaced file is noticed even if size and `st_mtime`
    are the same. Exceptions are file systems without `st_ctime` (FAT, some network mounts) and a clock that was set
    back. The inode (`st_ino`) would not detect more, and some mounts assign new inodes each time.
    """
    digest = hashlib.sha256()
    prefix = os.path.join(normal_path(root), "")
    for path, size, (changed, renamed) in zip(
        paths, stats.sizes.tolist(), stats.times.tolist(), strict=True
    ):
        row = f"{path.removeprefix(prefix)}\0{size}\0{changed}\0{renamed}\n"
        digest.update(row.encode(errors="surrogateescape"))
    return digest.hexdigest()


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is a pipe, which would block until it is written to.
    """
    text = os.fspath(path)
    return storage_of(text).open_file(text)


def read_pieces(path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
    """Return the size of a file and pieces of it. Nothing else is read.

    Args:
        path: The file.
        num_bytes: Size of each piece, at most: the file may end before.
        starts: Returns where the pieces start, from the size of the file.

    Raises:
        OSError: The file cannot be read.
    """
    return storage_of(path).read_pieces(path, num_bytes, starts)
