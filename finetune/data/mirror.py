"""Copies of images in object storage on the local disk, in the folder of caches.

A folder of a bucket is listed once. All questions about its files are answered from this list. A file that is read is
copied first: with the ETag of the list, under a temporary name, which is then replaced. So workers, checks and caches
read local files only, and a later epoch or run needs no request for a file with the same ETag. Several processes may
copy the same files.

If the files need more than half of the free disk, each process has a folder of its own. It deletes the copies that were
used longest ago, but none that a worker may still read.

Only the process that has listed a folder copies its files: a client of object storage does not survive a fork.
"""

import errno
import logging
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

from finetune.data.addresses import StorageError, is_in_bucket, parse_address
from finetune.data.bucket_client import Object, endpoint_of, read, read_range
from finetune.data.bucket_tree import list_tree
from finetune.data.limits import MAX_BYTES
from finetune.system.cache_dir import COPIES, available_bytes, cache_dir
from finetune.system.daemon_threads import complete
from finetune.system.messages import bytes_text, reason

log = logging.getLogger(__name__)

_NUM_THREADS = 128  # requests at a time; each waits for the network most of its time
_NUM_AHEAD = 256  # files that are requested ahead, at least one group
_BYTES_AHEAD = 256 * 2**20  # of these files

_SMALL_BYTES = 2**16  # of a file that is read whole, in one request, where pieces of it are wanted
_NUM_SUBMITTED = 4  # per thread, calls of `map_files` that wait or are running
_POLL_SECONDS = 0.5  # between two calls of `while_waiting`

_Group = TypeVar("_Group")
_Result = TypeVar("_Result")


class Mirror:
    """The files in a folder of a bucket, which are copied to the local disk when they are needed.

    Args:
        address: The folder, or a single file. It is listed.
        limit_bytes: Largest size of the copies. By default that of all files may be half of the free disk; if they need
            more, the copies of this process take no more than is still free.

    Attributes:
        root: The address in its shortest form.
        tree: The list of its files.
        folder: The folder of the copies.

    Raises:
        WrongUsage: The address is invalid, or the package for object storage is not installed.
        StorageError: The storage cannot be reached.
    """

    def __init__(self, address: str, limit_bytes: float | None = None) -> None:
        parsed = parse_address(address)
        self.root = str(parsed)
        self.tree = list_tree(parsed)
        self.folder = _shared_folder(self.root)
        self._requests: dict[str, Future[None]] = {}
        # The copies in a folder of this process alone and their sizes, those used longest ago first.
        self._copies: dict[str, int] = {}
        self._num_bytes = 0
        self._pins: Counter[str] = Counter()  # how many groups that may still be read hold a file
        self._limit = limit_bytes
        self._process = os.getpid()
        self._is_logged = False
        self._lock = threading.RLock()  # threads read files, too
        objects = self.tree.objects
        limit = available_bytes(self.folder) if limit_bytes is None else limit_bytes
        num_bytes = sum(item.size for item in objects.values())
        if num_bytes > limit:
            num_bytes = sum(item.size for path, item in objects.items() if not self.has(path))
        self.is_kept = num_bytes <= limit
        if not self.is_kept:
            self.folder = _own_folder(self)

    def local(self, path: str) -> Path:
        """Return where the copy of a file is, or will be."""
        return _place(self.folder, path)

    def has(self, path: str) -> bool:
        """Return whether the copy of a file is there, with the content of the list."""
        item = self.tree.objects[path]
        try:
            status = self.local(path).stat()
        except OSError:
            return False
        return (status.st_size, int(status.st_mtime)) == (item.size, _stamp(item))

    def holds(self, path: str) -> bool:
        """Return whether a file is in the list, and this process may copy it."""
        return path in self.tree.objects and self._process == os.getpid()

    def request(self, path: str) -> "Future[None] | None":
        """Begin to copy a file; the result is when it has arrived, None if it is there. See `holds`.

        The copy is not deleted until `release`.
        """
        item = self.tree.objects[path]
        with self._lock:
            self._pins[path] += 1
            self._use(path, item.size)
            request = self._requests.get(path)
            if request is not None:
                return request
            if self.has(path):
                return None
            self._log_once()
            request = self._requests[path] = _submit(partial(self._copy, path, item))
        request.add_done_callback(lambda _: self._requests.pop(path, None))
        return request

    def release(self, path: str) -> None:
        """End the use of a file that was requested."""
        if self._process != os.getpid():  # a forked worker, which deletes no copy
            return
        with self._lock:
            self._pins[path] -= 1
            if self._pins[path] <= 0:
                del self._pins[path]

    def read_pieces(
        self, path: str, num_bytes: int, starts: Callable[[int], Sequence[int]]
    ) -> tuple[int, list[bytes]]:
        """Return the size of a file and pieces of it, which are requested; see `files.read_pieces`."""
        item = self.tree.objects[path]
        read_part = partial(read_range, parse_address(path), item.e_tag)
        if 0 < item.size <= _SMALL_BYTES:
            content = read_part(0, item.size)
            return item.size, [content[start : start + num_bytes] for start in starts(item.size)]
        pieces = [
            read_part(start, min(num_bytes, item.size - start)) if start < item.size else b""
            for start in starts(item.size)
        ]
        return item.size, pieces

    def _use(self, path: str, size: int) -> None:
        """Count a file as the last used. If the copies exceed the limit, delete those that were used longest ago."""
        if self.is_kept:
            return
        self._num_bytes += size - self._copies.pop(path, 0)
        self._copies[path] = size
        excess = self._num_bytes - self._most_bytes()
        victims: list[str] = []
        for other, num in self._copies.items():
            if excess <= 0:
                break
            if other not in self._pins:
                victims.append(other)
                excess -= num
        for other in victims:
            self._num_bytes -= self._copies.pop(other)
            self.local(other).unlink(missing_ok=True)

    def _most_bytes(self) -> float:
        """Return the limit of the copies of a process whose copies are not kept."""
        return shutil.disk_usage(self.folder).free if self._limit is None else self._limit

    def bytes_ahead(self) -> float:
        """Return how many bytes may be requested before they are needed."""
        return _BYTES_AHEAD if self.is_kept else min(_BYTES_AHEAD, self._most_bytes() / 2)

    def _log_once(self) -> None:
        # imports torch, which a check of images does not wait for
        from finetune.distributed.signals import is_rank_zero

        if self._is_logged or not is_rank_zero():
            return
        self._is_logged = True
        size = bytes_text(sum(item.size for item in self.tree.objects.values()))
        text = f"images are copied once, to {self.folder}"
        if not self.is_kept:
            text = "more than half of the free disk: copies are deleted and requested again"
        log.info("%s, up to %s: %s", self.root, size, text)

    def _copy(self, path: str, item: Object) -> None:
        """Copy a file. Of one that is too large for an image there is only a file of its size, which is not decoded."""
        target = self.local(path)
        try:
            content = read(parse_address(path), item.e_tag) if item.size <= MAX_BYTES else b""
        except FileNotFoundError:  # deleted since it was listed; reading it says so
            target.unlink(missing_ok=True)
            return
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
        stamp = _stamp(item)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(content)
                file.truncate(max(len(content), item.size))
            os.utime(temporary, (stamp, stamp))
            temporary.replace(target)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError(
                f"cannot copy {path} to {self.folder}: {reason(error, target.parent)}. Set FINETUNE_CACHE to a folder "
                "of a disk with more space"
            ) from error


def _stamp(item: Object) -> int:
    """Return the time that the copy of an object has, in seconds: it stands for the content, by its ETag."""
    return 2**29 + item.version() % 2**30  # which all file systems can store: between 1987 and 2021


def _shared_folder(address: str) -> Path:
    """Return the folder of the copies of a bucket's files."""
    scheme, bucket, _ = parse_address(address)
    key = f"{endpoint_of(scheme)} {scheme}"
    digest = blake2b(key.encode(errors="surrogateescape"), digest_size=4).hexdigest()
    return cache_dir() / COPIES / f"{bucket}-{digest}"


def _place(folder: Path, path: str) -> Path:
    """Return the path of a copy. Names of objects may be too long for a file, or that of a file and a folder."""
    key = parse_address(path).key.encode(errors="surrogateescape")
    name = blake2b(key, digest_size=16).hexdigest()
    return folder / name[:2] / name[2:]


def _own_folder(mirror: Mirror) -> Path:
    """Return a new folder that is deleted with the mirror, and delete those of processes that have ended."""
    host = socket.gethostname()
    parent = cache_dir() / COPIES
    for folder in parent.glob(f"process-{host}-*"):
        if folder.name.rsplit("-", 2)[0] != f"process-{host}":  # of `node-1`, on `node`
            continue
        with suppress(ValueError, PermissionError):  # PermissionError: of another user
            try:
                os.kill(int(folder.name.split("-")[-2]), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"process-{host}-{os.getpid()}-", dir=parent))
    except OSError as error:
        raise StorageError(
            f"cannot copy {mirror.root} to {parent}: {reason(error, parent)}. Set FINETUNE_CACHE to another folder"
        ) from error
    weakref.finalize(mirror, _remove, folder, os.getpid())
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a forked worker
        shutil.rmtree(folder, ignore_errors=True)


MIRRORS: dict[str, Mirror] = {}  # by their roots, the newest last
_folders: dict[str, Path] = {}  # of the mirrors of the process that has started this worker


def list_again(address: str) -> Mirror:
    """Return the mirror of an address with a new list of its files; `mirror_of` then finds it."""
    mirror = Mirror(address)
    MIRRORS.pop(mirror.root, None)
    MIRRORS[mirror.root] = mirror
    return mirror


def mirror_of(path: str) -> Mirror | None:
    """Return the newest mirror that a file belongs to; None if no folder with it was listed."""
    root = _root_of(path, MIRRORS)
    return None if root is None else MIRRORS[root]


def _root_of(path: str, roots: Iterable[str]) -> str | None:
    """Return the last of the folders that a path lies in."""
    found = None
    for root in roots:
        if path == root or path.startswith(f"{root}/"):
            found = root
    return found


def mirror_folders() -> dict[str, Path]:
    """Return the folders of copies by the roots of their mirrors, for workers that are not forked."""
    return {root: mirror.folder for root, mirror in MIRRORS.items()}


def use_folders(folders: dict[str, Path]) -> None:
    """Read copies from the folders of the process that has started this worker."""
    _folders.update(folders)


def fetched(path: str) -> str:
    """Return the path of a file on the local disk, of a file in a bucket after it was copied.

    Raises:
        FileNotFoundError: It does not exist. Or no folder with it was listed, and no earlier run has copied it: an
            untrusted file may name any address.
        StorageError: The storage cannot be reached, or the file was replaced.
    """
    if not is_in_bucket(path):
        return path
    mirror = mirror_of(path)
    if mirror is not None and mirror.holds(path):
        planned = _Planned(path, [(mirror, path)])
        planned.wait(lambda: None)
        planned.release()
    local = _copy_of(path, mirror)
    if not local.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return str(local)


def _copy_of(path: str, mirror: Mirror | None) -> Path:
    """Return where the copy of a file is, or would be. A worker that is not forked has no mirror."""
    if mirror is not None:
        return mirror.local(path)
    root = _root_of(path, _folders)
    return _place(_shared_folder(path) if root is None else _folders[root], path)


class _Threads:
    """Threads that do not delay the end of the process, as a request that is repeated for minutes would."""

    def __init__(self, num: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        for i in range(num):
            threading.Thread(target=self._work, name=f"fetch-{i}", daemon=True).start()

    def submit(self, task: Callable[[], _Result]) -> "Future[_Result]":
        future: Future[_Result] = Future()
        self._tasks.put((future, task))
        return future

    def _work(self) -> None:
        while True:
            future, task = self._tasks.get()
            if future.set_running_or_notify_cancel():
                complete(future, task)
            del future, task  # or they keep the mirror, and so its folder


_threads: _Threads | None = None


def _submit(task: Callable[[], _Result]) -> "Future[_Result]":
    global _threads
    if _threads is None:
        _threads = _Threads(_NUM_THREADS)
    return _threads.submit(task)


class _Planned(Generic[_Group]):
    """A group whose files are requested.

    Args:
        group: The group.
        files: Its files in buckets, each with its mirror.
    """

    def __init__(self, group: _Group, files: list[tuple[Mirror, str]]) -> None:
        self.group = group
        self.files = files
        requests = [mirror.request(path) for mirror, path in files]
        self.requests = [request for request in requests if request is not None]
        self.num_bytes = sum(mirror.tree.objects[path].size for mirror, path in files)
        self.bytes_ahead = files[-1][0].bytes_ahead() if files else _BYTES_AHEAD

    def wait(self, while_waiting: Callable[[], None]) -> None:
        for request in self.requests:
            while not request.done() and not wait([request], _POLL_SECONDS).done:
                while_waiting()
            request.result()

    def release(self) -> None:
        for mirror, path in self.files:
            mirror.release(path)


def _release_all(groups: "Iterable[_Planned[Any]]") -> None:
    for group in groups:
        group.release()


class Ahead(Generic[_Group]):
    """Groups of files, such as batches, each when its files are on the local disk. The next ones are copied meanwhile.

    Local files are not looked at. It may be iterated several times.

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
        planned: deque[_Planned[_Group]] = deque()
        remaining = iter(self.groups)
        num_files = 0
        num_bytes = 0

        def plan() -> None:
            nonlocal num_files, num_bytes
            while not planned or (num_files < _NUM_AHEAD and num_bytes < planned[-1].bytes_ahead):
                try:
                    group = next(remaining)
                except StopIteration:
                    return
                planned.append(_Planned(group, self._files_in(group)))
                num_files += max(1, len(planned[-1].files))
                num_bytes += planned[-1].num_bytes

        try:
            plan()
            while planned:
                first = planned.popleft()
                num_files -= max(1, len(first.files))
                num_bytes -= first.num_bytes
                self._taken.append(first)
                while len(self._taken) > self._in_use:
                    self._taken.popleft().release()
                plan()  # before the wait: a group may be as large as all that is requested ahead
                first.wait(self._while_waiting)
                yield first.group
        finally:
            _release_all(planned)

    def _files_in(self, group: _Group) -> list[tuple[Mirror, str]]:
        """Return the files of a group that are in buckets, each with its mirror."""
        files = []
        for path in self._files_of(group):
            mirror = mirror_of(path) if is_in_bucket(path) else None
            if mirror is not None and mirror.holds(path):
                files.append((mirror, path))
        return files


def map_files(
    function: Callable[[str], _Result], paths: Iterable[str], num_threads: int = 0
) -> Generator[_Result, None, None]:
    """Yield the result of a function for each file, in order. Files in a bucket are copied ahead.

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
        function: Called with the path of a file; see `files.read_pieces`.
        paths: The files.

    Raises:
        StorageError: The storage cannot be reached.
    """
    waiting: deque[Callable[[], _Result]] = deque()
    for path in paths:
        read_one = partial(function, path)
        waiting.append(_submit(read_one).result if is_in_bucket(path) else read_one)
        if len(waiting) > _NUM_AHEAD:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
