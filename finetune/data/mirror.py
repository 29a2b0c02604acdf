"""An address in object storage is a folder on the local disk, in the folder of caches.

A folder of a bucket is listed once, and its folders and files are made there, the files empty. All other code sees a
local folder: it finds images, classes and names in it as in any other. An empty file gets its content when it is to be
read: with the ETag of the list, written elsewhere and then moved into its place. So workers, checks and caches read
local files only, and a later epoch or run needs no request for a file with the same ETag. Several processes may share
a folder. Each goes by its own list: what another process has listed later is neither found nor read.

If the files need more than half of the free disk, each process has a folder of its own. It keeps as many files as fit,
and deletes the others when they were read, but none that a worker may still read.

Only the process that has listed a folder fills it: a client of object storage does not survive a fork.
"""

import errno
import glob
import logging
import os
import re
import secrets
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

from finetune.data import bucket
from finetune.data.addresses import Address, StorageError, is_in_bucket, parse_address
from finetune.data.limits import MAX_BYTES
from finetune.system.cache_dir import COPIES, COPIES_MARK, available_bytes, cache_dir
from finetune.system.daemon_threads import DaemonThreads
from finetune.system.files import one_at_a_time
from finetune.system.messages import bytes_text, reason
from finetune.system.process_folder import PREFIX, process_folder

log = logging.getLogger(__name__)

_NUM_THREADS = 128  # requests at a time; each waits for the network most of its time
_NUM_AHEAD = 256  # files that are requested ahead, at least one group
_BYTES_AHEAD = 256 * 2**20  # of these files

_SMALL_BYTES = 2**16  # of a file that is read whole, in one request, where pieces of it are wanted
_NUM_SUBMITTED = 4  # per thread, calls of `map_files` that wait or are running
_POLL_SECONDS = 0.5  # between two calls of `while_waiting`

# The folder of a bucket's copies, in that of all copies, and the key of one.
_COPY = re.compile(
    rf"(?:{re.escape(PREFIX)}[^/]+/)?(s3|gs|az)-([^/]+)-[0-9a-f]{{8}}(?:/(.*))?", re.S
)

_Group = TypeVar("_Group")
_Result = TypeVar("_Result")


class Mirror:
    """The local folder of an address, or the file of a single object. It is listed, and its empty files are made.

    Args:
        address: The address.
        limit_bytes: Largest size of the copies. By default that of all files may be half of the free disk.

    Attributes:
        address: The address in its shortest form.
        path: The path of the local folder or file.
        is_kept: Whether the copies stay for later runs.

    Raises:
        WrongUsage: The address is invalid, or the package for object storage is not installed.
        FileNotFoundError: There is nothing at the address.
        StorageError: The storage cannot be reached, or the folder cannot be written.
    """

    def __init__(self, address: str, limit_bytes: float | None = None) -> None:
        parsed = parse_address(address)
        self.address = str(parsed)
        objects = _objects_at(parsed)
        self._process = os.getpid()
        self._limit = limit_bytes
        self._requests: dict[str, Future[None]] = {}
        self._kept: set[str] = set()  # copies that stay in a folder of this process, and their size
        self._kept_bytes = 0
        self._is_logged = False
        try:
            copies = Path(os.path.abspath(cache_dir() / COPIES))
            self._temporary = process_folder(copies)
            self._set_place(copies, objects)
            most = self._most_bytes(str(copies))
            num_bytes = sum(item.size for item in objects.values())
            if num_bytes > most:
                missing = [item for path, item in self.objects.items() if not self.has(path)]
                num_bytes = sum(item.size for item in missing)
            self.is_kept = num_bytes <= most
            if not self.is_kept:
                self._set_place(self._temporary, objects)
            with one_at_a_time(Path(self._folder)):
                self._make_files()
        except OSError as error:
            raise self._not_copied(error) from error
        _add_mirror(self)

    def _set_place(self, parent: Path, objects: dict[str, bucket.Object]) -> None:
        """Set the folder of the bucket, the path of this mirror in it, and the objects by their paths."""
        scheme, name, key = parse_address(self.address)
        of_server = f"{bucket.endpoint_of(scheme)} {scheme}".encode(errors="surrogateescape")
        digest = blake2b(of_server, digest_size=4).hexdigest()
        self._folder = str(parent / f"{scheme}-{name}-{digest}")
        self.path = f"{self._folder}/{key}" if key else self._folder
        self.objects = {
            f"{self.path}/{name}" if name else self.path: item for name, item in objects.items()
        }

    def _make_files(self) -> None:
        """Make the folders and files of the list, the new ones empty, and delete those that it does not have."""
        os.makedirs(self._folder, exist_ok=True)
        Path(self._folder, COPIES_MARK).touch()
        there: set[str] = set()
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                path = f"{folder}/{name}"
                if path in self.objects:
                    there.add(path)
                elif name != COPIES_MARK:
                    os.unlink(path)
            with suppress(OSError):  # it is not empty
                os.rmdir(folder)
        if self.path not in self.objects:
            if os.path.isfile(self.path):
                os.unlink(self.path)
            os.makedirs(self.path, exist_ok=True)
        made: set[str] = set()
        for path in self.objects.keys() - there:
            folder = os.path.dirname(path)
            if folder not in made:
                made.add(folder)
                os.makedirs(folder, exist_ok=True)
            _make_file(path)

    @cached_property
    def folders(self) -> dict[str, list[str]]:
        """The files and folders in each folder of the list, by their paths."""
        folders: dict[str, list[str]] = {} if self.path in self.objects else {self.path: []}
        for path in self.objects:
            while path != self.path:
                folder = os.path.dirname(path)
                is_new = folder not in folders
                folders.setdefault(folder, []).append(path)
                if not is_new:
                    break
                path = folder
        return folders

    def address_of(self, path: str) -> str:
        """Return the address of a file."""
        return self.address + path.removeprefix(self.path)

    def has(self, path: str) -> bool:
        """Return whether a file has the content of the list."""
        try:
            status = os.stat(path)
        except OSError:
            return False
        return _is_copy(status, self.objects[path])

    def can_fill(self, path: str) -> bool:
        """Return whether a file is in the list, and this process may request it."""
        return path in self.objects and self._process == os.getpid()

    def request(self, path: str) -> "Future[None] | None":
        """Begin to copy a file; the result is when it has arrived, None if it is there. See `can_fill`.

        The copy is not deleted until `release`.
        """
        with _lock:
            _pins[path] += 1
            if path in self._requests:
                return self._requests[path]
            if self.has(path):
                return None
            self._log_once()
            request = self._requests[path] = _threads.submit(partial(self._copy, path))
        request.add_done_callback(lambda _: self._requests.pop(path, None))
        return request

    def release(self, path: str) -> None:
        """End the use of a file that was requested. In a folder of this process it is emptied, unless it may stay."""
        if self._process != os.getpid():  # a forked worker, which deletes no copy
            return
        with _lock:
            _pins[path] -= 1
            if _pins[path] > 0:
                return
            del _pins[path]
            if self.is_kept or path in self._kept:
                return
            num_bytes = self._kept_bytes + self.objects[path].size
            if num_bytes > self._most_bytes(self._folder):
                # a reader that has opened it keeps the content
                Path(path).unlink(missing_ok=True)
                with suppress(OSError):  # the disk is full; the list has the file all the same
                    _make_file(path)
            else:
                self._kept.add(path)
                self._kept_bytes = num_bytes

    def read_pieces(
        self, path: str, num_bytes: int, starts: Callable[[int], Sequence[int]]
    ) -> tuple[int, list[bytes]]:
        """Return the size of a file and pieces of it, which are requested; see `image_files.read_pieces`."""
        item = self.objects[path]
        read_part = partial(bucket.read, self.address_of(path), item.e_tag)
        if 0 < item.size <= _SMALL_BYTES:
            content = self._read(path)
            return item.size, [content[start : start + num_bytes] for start in starts(item.size)]
        pieces = [
            read_part(start, min(num_bytes, item.size - start)) if start < item.size else b""
            for start in starts(item.size)
        ]
        return item.size, pieces

    def _most_bytes(self, folder: str) -> float:
        """Return how many bytes the copies in a folder may take."""
        return available_bytes(Path(folder)) if self._limit is None else self._limit

    def bytes_ahead(self) -> float:
        """Return how many bytes may be requested before they are needed."""
        if self.is_kept:
            return _BYTES_AHEAD
        return max(1, min(_BYTES_AHEAD, self._most_bytes(self._folder) / 2))

    def _log_once(self) -> None:
        # imports torch, which a check of images does not wait for
        from finetune.distributed.signals import is_rank_zero

        if self._is_logged or not is_rank_zero():
            return
        self._is_logged = True
        size = bytes_text(sum(item.size for item in self.objects.values()))
        text = f"images are copied once, to {self._folder}"
        if not self.is_kept:
            text = "more than half of the free disk: some are requested again in each epoch"
        log.info("%s, up to %s: %s", self.address, size, text)

    def _read(self, path: str) -> bytes:
        """Return the content of an object. Storage without ETags cannot say that it was replaced; its size may."""
        item = self.objects[path]
        content = bucket.read(self.address_of(path), item.e_tag)
        if len(content) != item.size:
            raise bucket.replaced(self.address_of(path), "size")
        return content

    def _copy(self, path: str) -> None:
        """Copy a file. Of one that is too large for an image there is only a file of its size, which is not decoded."""
        item = self.objects[path]
        try:
            content = self._read(path) if item.size <= MAX_BYTES else b""
        except FileNotFoundError:  # deleted since it was listed; reading it says so
            Path(path).unlink(missing_ok=True)
            return
        temporary = self._temporary / secrets.token_hex(8)
        try:
            temporary.write_bytes(content)
            os.truncate(temporary, item.size)
            os.utime(temporary, (_stamp(item), _stamp(item)))
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._not_copied(error) from error

    def _not_copied(self, error: OSError) -> StorageError:
        if error.errno == errno.ENAMETOOLONG:
            where = original(str(error.filename))
            return StorageError(f"{where}: the name is too long for a file of this disk: rename it")
        folder = cache_dir() / COPIES
        return StorageError(
            f"cannot copy {self.address} to {folder}: {reason(error, folder)}. Set FINETUNE_CACHE to a folder of a "
            "disk with more space"
        )


def _objects_at(address: Address) -> dict[str, bucket.Object]:
    """Return the objects in a folder by their names in it; "" is the name of a single object.

    An empty object with the name of a folder marks it. A name cannot be that of an image and of a folder.
    """
    place = str(address)
    objects = bucket.objects_in(place)
    if not objects and address.key:
        item = bucket.head(place, is_start=True)
        if item is None:
            hint = "; globs find local files only" if glob.has_magic(address.key) else ""
            raise FileNotFoundError(f"{place!r} does not exist{hint}")
        return {"": item}
    folders: set[str] = set()
    for name in objects:
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    for name in folders & objects.keys():
        if objects.pop(name).size:
            raise StorageError(
                f"{place}/{name} is the name of an object and of a folder: rename one of them"
            )
    return objects


def _stamp(item: bucket.Object) -> int:
    """Return the time that the copy of an object has, in seconds: it stands for the content, by its ETag."""
    return 2**29 + item.version() % 2**30  # which all file systems can store: between 1987 and 2021


def _is_copy(status: os.stat_result, item: bucket.Object) -> bool:
    """Return whether a file is the complete copy of an object."""
    return (status.st_size, int(status.st_mtime)) == (item.size, _stamp(item))


def _make_file(path: str) -> None:
    """Make an empty file, unless there is a file."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))


_threads = DaemonThreads(_NUM_THREADS, "copy")
_piece_threads = DaemonThreads(_NUM_THREADS, "pieces")  # which may wait for a copy
# By their paths, the newest last. It is replaced and not changed, because threads go through it.
_mirrors: dict[str, Mirror] = {}
_lock = RLock()  # threads read files, too
# How many groups that may still be read hold a file. Two mirrors may have the same file.
_pins: Counter[str] = Counter()


def _add_mirror(mirror: Mirror) -> None:
    global _mirrors
    with _lock:
        others = {path: other for path, other in _mirrors.items() if path != mirror.path}
        _mirrors = {**others, mirror.path: mirror}


def mirror_of(path: str) -> Mirror | None:
    """Return the newest mirror that a local path belongs to; None for other paths."""
    if f"/{COPIES}/" not in path:
        return None
    found = None
    for root, mirror in _mirrors.items():
        if path == root or path.startswith(f"{root}/"):
            found = mirror
    return found


def listed(path: str) -> bucket.Object | None:
    """Return the object whose copy a path is in the newest list of this process; None for other paths.

    Raises:
        FileNotFoundError: It is in the folder of an address, whose list does not have it.
    """
    mirror = mirror_of(path)
    if mirror is None:
        return None
    if path not in mirror.objects:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return mirror.objects[path]


def check_copy(path: str, descriptor: int) -> None:
    """Check that an open file is the copy of the object that was listed, not a later one by another process.

    Raises:
        FileNotFoundError: The list does not have it; see `listed`.
        StorageError: The object was replaced.
    """
    item = listed(path)
    if item is not None and not _is_copy(os.fstat(descriptor), item):
        raise bucket.replaced(original(path), "ETag")


def original(path: str) -> str:
    """Return the address of a copy, or else the path itself."""
    before, _, inside = path.partition(f"/{COPIES}/")
    match = _COPY.fullmatch(inside)
    if match is None or Path(before) != Path(os.path.abspath(cache_dir())):
        return path
    return str(Address(match[1], match[2], match[3] or ""))


def local_paths(addresses: Sequence[str]) -> list[str]:
    """Return the local paths of files in buckets; other paths stay. Their common folder in each bucket is listed."""
    keys: dict[tuple[str, str], list[str]] = {}
    for path in filter(is_in_bucket, addresses):
        scheme, name, key = parse_address(path)
        keys.setdefault((scheme, name), []).append(key)
    mirrors = {
        place: Mirror(str(Address(*place, os.path.commonpath(map(os.path.dirname, of_bucket)))))
        for place, of_bucket in keys.items()
    }

    def local(path: str) -> str:
        if not is_in_bucket(path):
            return path
        address = parse_address(path)
        mirror = mirrors[address.scheme, address.bucket]
        return mirror.path + str(address).removeprefix(mirror.address)

    return [*map(local, addresses)]


@contextmanager
def filled(path: str) -> Iterator[None]:
    """Give a file its content, if it is a copy, and keep it meanwhile.

    Raises:
        FileNotFoundError: It was deleted in the bucket.
        StorageError: The storage cannot be reached, or the file was replaced.
    """
    planned = _Planned(path, [path])
    try:
        planned.wait()
        yield
    finally:
        planned.release()


class _Planned(Generic[_Group]):
    """A group whose files are requested.

    Args:
        group: The group.
        paths: Its files, of which only copies are looked at.

    Attributes:
        weight: Its part of all that may be requested ahead.
    """

    def __init__(self, group: _Group, paths: Iterable[str]) -> None:
        self.group = group
        found = ((mirror_of(path), path) for path in paths)
        self._files = [(m, path) for m, path in found if m is not None and m.can_fill(path)]
        self._requests = [mirror.request(path) for mirror, path in self._files]
        self.weight = max(1, len(self._files)) / _NUM_AHEAD
        for mirror, path in self._files:
            self.weight += mirror.objects[path].size / mirror.bytes_ahead()

    def wait(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        for request in filter(None, self._requests):
            while not request.done() and not wait([request], _POLL_SECONDS).done:
                while_waiting()
            request.result()

    def release(self) -> None:
        for mirror, path in self._files:
            mirror.release(path)


def _release_all(groups: Iterable[_Planned[Any]]) -> None:
    for group in groups:
        group.release()


class Ahead(Generic[_Group]):
    """Groups of files, such as batches, each when its files are on the local disk. The next ones are copied meanwhile.

    It may be iterated several times.

    Args:
        groups: The groups.
        files_of: Returns the paths of a group.
        in_use: A group may be read until this many others were taken.
        while_waiting: Called every half second while a file is waited for.

    Raises:
        StorageError: The storage cannot be reached, a file was replaced, or the disk is full.
    """

    def __init__(
        self,
        groups: Iterable[_Group],
        files_of: Callable[[_Group], Iterable[str]],
        in_use: int = 1,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.groups = groups
        self._files_of = files_of
        self._in_use = in_use
        self._while_waiting = while_waiting
        self._taken: deque[_Planned[_Group]] = deque()
        weakref.finalize(self, _release_all, self._taken)

    def __len__(self) -> int:
        groups: Any = self.groups
        return len(groups)

    def __iter__(self) -> Iterator[_Group]:
        remaining = map(lambda group: _Planned(group, self._files_of(group)), self.groups)
        ahead: deque[_Planned[_Group]] = deque()
        weight = 0.0
        try:
            while True:
                while len(self._taken) >= self._in_use:
                    self._taken.popleft().release()
                # the group that is waited for, and at least one more
                while weight < 1 or len(ahead) < 2:
                    planned = next(remaining, None)
                    if planned is None:
                        break
                    ahead.append(planned)
                    weight += planned.weight
                if not ahead:
                    return
                first = ahead.popleft()
                weight -= first.weight
                self._taken.append(first)
                first.wait(self._while_waiting)
                yield first.group
        finally:
            _release_all(ahead)


def map_files(
    function: Callable[[str], _Result], paths: Iterable[str], num_threads: int = 0
) -> Generator[_Result, None, None]:
    """Yield the result of a function for each file, in order. Files of a bucket are copied ahead.

    Args:
        function: Called with the path of a file.
        paths: The files.
        num_threads: Calls at a time, for example one for each core; 0 calls it in this thread.

    Raises:
        StorageError: The storage cannot be reached, or a file was replaced.
    """
    most = _NUM_SUBMITTED * num_threads  # few, because an interruption waits for them
    ahead = Ahead(paths, lambda path: [path], in_use=most + 2)
    if not num_threads:
        yield from map(function, ahead)
        return
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(num_threads) as threads:
        for path in ahead:
            waiting.append(threads.submit(function, path))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def map_pieces(
    function: Callable[[str], _Result], paths: Iterable[str]
) -> Generator[_Result, None, None]:
    """Yield the result of a function that reads pieces of each file, in order. It is called in threads for a bucket.

    Args:
        function: Called with the path of a file; see `image_files.read_pieces`.
        paths: The files.

    Raises:
        StorageError: The storage cannot be reached.
    """
    waiting: deque[Callable[[], _Result]] = deque()
    for path in paths:
        read_one = partial(function, path)
        is_copy = mirror_of(path) is not None
        waiting.append(_piece_threads.submit(read_one).result if is_copy else read_one)
        if len(waiting) > _NUM_AHEAD:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
