"""Images in object storage: a folder is listed once, and each object is copied once, when it is first read.

Paths of such images are their addresses. `image_files` asks the list for kinds, sizes and entries, and opens copies.
A copy is named by a hash of the key, the size and the ETag of the object. So it is complete or absent, a replaced
object has another one, and several processes and later runs use the same copies.

If the images need more than half of the free disk, each process has a folder of its own. It keeps as many copies as
fit, and deletes the others when they were read, but none that a worker may still read.

Only the process that has listed a folder copies from it: a client of object storage does not survive a fork.
"""

import errno
import logging
import os
import secrets
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

from finetune.data import bucket
from finetune.data.addresses import StorageError, is_in_bucket, parse_address
from finetune.data.limits import MAX_BYTES
from finetune.system.cache_dir import COPIES, COPIES_MARK, available_bytes, cache_dir
from finetune.system.daemon_threads import DaemonThreads
from finetune.system.messages import bytes_text, reason
from finetune.system.process_folder import process_folder

log = logging.getLogger(__name__)

_NUM_THREADS = 128  # requests at a time; each waits for the network most of its time
_NUM_AHEAD = 256  # files that are requested ahead, at least one group
_BYTES_AHEAD = 256 * 2**20  # of these files
_NUM_SUBMITTED = 4  # per thread, calls of `map_files` that wait or are running
_POLL_SECONDS = 0.5  # between two calls of `while_waiting`

_Group = TypeVar("_Group")
_Result = TypeVar("_Result")


class Mirror:
    """The list of an address, and the copies of its objects.

    Args:
        address: The address of a folder or an object.
        limit_bytes: Largest size of the copies. By default that of all files may be half of the free disk.

    Attributes:
        address: The address in its shortest form.
        objects: The objects in the folder, by their addresses.
        is_kept: Whether the copies stay for later runs.

    Raises:
        WrongUsage: The address is invalid.
        FileNotFoundError: There is nothing at the address.
        StorageError: The storage cannot be reached, or the folder of copies cannot be written.
    """

    def __init__(self, address: str, limit_bytes: float | None = None) -> None:
        parsed = parse_address(address)
        self.address = str(parsed)
        self.objects = _objects_at(self.address)
        self._process = os.getpid()
        self._limit = limit_bytes
        self._kept: set[str] = set()  # copies that stay in a folder of this process, and their size
        self._kept_bytes = 0
        of_server = f"{bucket.endpoint_of(parsed.scheme)} {parsed.scheme}"
        server = blake2b(of_server.encode(errors="surrogateescape"), digest_size=4).hexdigest()
        name = f"{parsed.scheme}-{parsed.bucket}-{server}"
        copies = Path(os.path.abspath(cache_dir() / COPIES))
        try:
            self._temporary = process_folder(copies)
            self._folder = copies / name
            num_bytes = sum(item.size for item in self.objects.values())
            if num_bytes > self._most_bytes():
                missing = (item for place, item in self.objects.items() if not self.has(place))
                num_bytes = sum(item.size for item in missing)
            self.is_kept = num_bytes <= self._most_bytes()
            if not self.is_kept:
                self._folder = self._temporary / name
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / COPIES_MARK).touch()
        except OSError as error:
            raise self._not_copied(error) from error
        if not self.is_kept:
            what = "more than half of the free disk: some images are requested again in each epoch"
            log.info("%s: %s, %s", self.address, bytes_text(num_bytes), what)
        _add_mirror(self)

    @cached_property
    def folders(self) -> dict[str, list[str]]:
        """The files and folders in each folder of the list, by their addresses."""
        folders: dict[str, list[str]] = {} if self.address in self.objects else {self.address: []}
        for place in self.objects:
            while place != self.address:
                folder = os.path.dirname(place)
                is_new = folder not in folders
                folders.setdefault(folder, []).append(place)
                if not is_new:
                    break
                place = folder
        return folders

    def copy_of(self, place: str) -> str:
        """Return the path of the copy of an object, which may not exist yet."""
        item = self.objects[place]
        content = f"{parse_address(place).key}\0{item.size}\0{item.e_tag or item.changed}"
        name = blake2b(content.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        return f"{self._folder}/{name[:2]}/{name}"

    def has(self, place: str) -> bool:
        """Return whether there is a copy of an object."""
        return os.path.exists(self.copy_of(place))

    def can_copy(self, place: str) -> bool:
        """Return whether an object is in the list, and this process may request it."""
        return place in self.objects and self._process == os.getpid()

    def request(self, place: str) -> "Future[None] | None":
        """Begin to copy an object; the result is when it has arrived, None if there is a copy. See `can_copy`.

        The copy is not deleted until `release`.
        """
        path = self.copy_of(place)
        with _lock:
            _pins[path] += 1
            if path in _requests:
                return _requests[path]
            if self.has(place):
                return None
            request = _requests[path] = _threads.submit(partial(self._copy, place, path))
        request.add_done_callback(lambda _: _requests.pop(path, None))
        return request

    def release(self, place: str) -> None:
        """End the use of an object that was requested. In a folder of this process, its copy may be deleted."""
        if self._process != os.getpid():  # a forked worker, which deletes no copy
            return
        path = self.copy_of(place)
        with _lock:
            _pins[path] -= 1
            if _pins[path] > 0:
                return
            del _pins[path]
            if self.is_kept or path in self._kept:
                return
            num_bytes = self._kept_bytes + self.objects[place].size
            if num_bytes > self._most_bytes():
                Path(path).unlink(missing_ok=True)  # a reader that has opened it keeps the content
            else:
                self._kept.add(path)
                self._kept_bytes = num_bytes

    def read_part(self, place: str, start: int, num_bytes: int) -> bytes:
        """Return a part of an object, which is requested; b"" after its end."""
        item = self.objects[place]
        if start >= item.size:
            return b""
        return bucket.read(place, item.e_tag, start, min(num_bytes, item.size - start))

    def bytes_ahead(self) -> float:
        """Return how many bytes may be requested before they are needed."""
        if self.is_kept:
            return _BYTES_AHEAD
        return max(1, min(_BYTES_AHEAD, self._most_bytes() / 2))

    def _most_bytes(self) -> float:
        """Return how many bytes the copies may take. The free disk shrinks as other processes copy, too."""
        return available_bytes(self._folder) if self._limit is None else self._limit

    def _copy(self, place: str, path: str) -> None:
        """Copy an object. Of one that is too large for an image there is only a file of its size."""
        item = self.objects[place]
        try:
            content = bucket.read(place, item.e_tag) if item.size <= MAX_BYTES else b""
        except FileNotFoundError:  # deleted since it was listed; reading it says so
            return
        # storage without ETags cannot say that the object was replaced; its size may
        if item.size <= MAX_BYTES and len(content) != item.size:
            raise bucket.replaced(place, "size")
        temporary = self._temporary / secrets.token_hex(8)
        try:
            temporary.write_bytes(content)
            os.truncate(temporary, item.size)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._not_copied(error) from error

    def _not_copied(self, error: OSError) -> StorageError:
        folder = cache_dir() / COPIES
        return StorageError(
            f"cannot copy {self.address} to {folder}: {reason(error, folder)}. Set FINETUNE_CACHE to a folder of a "
            "disk with more space"
        )


def _objects_at(place: str) -> dict[str, bucket.Object]:
    """Return the objects in a folder, or the single object, by address. An empty object of a folder's name marks it."""
    objects = bucket.objects_in(place)
    if not objects and parse_address(place).key:
        item = bucket.head(place, is_start=True)
        if item is None:
            raise FileNotFoundError(f"{place!r} does not exist; globs find local files only")
        return {place: item}
    folders: set[str] = set()
    for name in objects:
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    for name in folders & objects.keys():
        if objects.pop(name).size:
            raise StorageError(
                f"{place}/{name} is the name of an object and of a folder: rename one of them"
            )
    return {f"{place}/{name}": item for name, item in objects.items()}


_threads = DaemonThreads(_NUM_THREADS, "copy")
_piece_threads = DaemonThreads(_NUM_THREADS, "pieces")  # which may wait for a copy
# By their addresses, the newest last. It is replaced and not changed, because threads go through it.
_mirrors: dict[str, Mirror] = {}
_lock = RLock()  # threads read files, too
# By the paths of copies, which two mirrors may have both: the requests that have not ended, and how many readers and
# groups that may still be read hold the copy.
_requests: dict[str, Future[None]] = {}
_pins: Counter[str] = Counter()


def _add_mirror(mirror: Mirror) -> None:
    global _mirrors
    with _lock:
        others = {place: other for place, other in _mirrors.items() if place != mirror.address}
        _mirrors = {**others, mirror.address: mirror}


def mirror_of(path: str) -> Mirror | None:
    """Return the newest mirror that an address belongs to; None for local paths, and where nothing was listed."""
    found = None
    if is_in_bucket(path):
        for place, mirror in _mirrors.items():
            if path == place or path.startswith(f"{place}/"):
                found = mirror
    return found


def listed(path: str) -> bucket.Object | None:
    """Return what the list says of an object; None for local paths.

    Raises:
        FileNotFoundError: It is not in a list of this process. An address in an untrusted file is not requested.
    """
    if not is_in_bucket(path):
        return None
    mirror = mirror_of(path)
    if mirror is None or path not in mirror.objects:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return mirror.objects[path]


@contextmanager
def copied(path: str) -> Iterator[str]:
    """Yield the local path of a file. An object is copied first, and its copy is kept meanwhile.

    Raises:
        FileNotFoundError: The object is not in a list; see `listed`.
        StorageError: The storage cannot be reached, or the object was replaced.
    """
    mirror = mirror_of(path)
    if listed(path) is None or mirror is None:
        yield path
        return
    planned = _Planned(path, [path])
    try:
        planned.wait()
        yield mirror.copy_of(path)
    finally:
        planned.release()


class _Planned(Generic[_Group]):
    """A group whose files are requested.

    Args:
        group: The group.
        paths: Its files, of which only objects are looked at.

    Attributes:
        weight: Its part of all that may be requested ahead.
    """

    def __init__(self, group: _Group, paths: Iterable[str]) -> None:
        self.group = group
        found = ((mirror_of(path), path) for path in paths)
        self._files = [(m, path) for m, path in found if m is not None and m.can_copy(path)]
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
    """Yield the result of a function for each file, in order. Objects are copied ahead.

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
    """Yield the result of a function that reads pieces of each file, in order. Threads call it for objects.

    Args:
        function: Called with the path of a file; see `image_files.read_pieces`.
        paths: The files.

    Raises:
        StorageError: The storage cannot be reached.
    """
    waiting: deque[Callable[[], _Result]] = deque()
    for path in paths:
        read_one = partial(function, path)
        in_bucket = is_in_bucket(path)
        waiting.append(_piece_threads.submit(read_one).result if in_bucket else read_one)
        if len(waiting) > _NUM_AHEAD:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
