"""Fetches the content of files at addresses before it is needed, in threads of the main process.

Clients of object storage do not survive a fork, so DataLoader workers cannot read from there. The main
process sends them the content of the files with the indices of a batch. Errors of the storage are raised in the main
process.
"""

import io
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO, Generic, TypeVar

from finetune.data.storage import file_stats, is_local, open_file
from finetune.system.daemon_threads import complete

_NUM_THREADS = 128  # requests at a time; each waits for the network most of its time
_NUM_AHEAD = 256  # files that are fetched ahead, at least one group
_BYTES_AHEAD = 256 * 2**20  # of these files, as far as their sizes are known

_NUM_SUBMITTED = 4  # per thread, calls of `map_contents` that wait or are running
_POLL_SECONDS = 0.5  # between two calls of `while_waiting`

_Group = TypeVar("_Group")
_Result = TypeVar("_Result")
Content = bytes | OSError  # of a file, or why it cannot be read
NO_CONTENTS: Mapping[str, Content] = MappingProxyType({})


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
            if not future.set_running_or_notify_cancel():
                continue
            complete(future, task)
            del future, task  # or the content of the file stays in memory


_threads: _Threads | None = None


def _submit(task: Callable[[], _Result]) -> "Future[_Result]":
    global _threads
    if _threads is None:
        _threads = _Threads(_NUM_THREADS)
    return _threads.submit(task)


def _content(path: str) -> Content:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:  # of this file only, and reported when it is decoded
        return error


@dataclass(frozen=True)
class Fetched(Generic[_Group]):
    """A group of files, and the content of those that are not on a local disk, by path."""

    group: _Group
    contents: dict[str, Content]


@dataclass(eq=False)
class _RequestedGroup(Generic[_Group]):
    """A group of files, and the requests for those that are not on a local disk.

    Attributes:
        group: The group.
        num_bytes: Size of these files together, as far as it is known.
        requests: The requests for these files, by path.
    """

    group: _Group
    num_bytes: int
    requests: dict[str, Future[Content]]

    def take_contents(self, while_waiting: Callable[[], None]) -> dict[str, Content]:
        """Wait for the files and return the content of each. It is then in the memory of the caller only."""
        paths = list(self.requests)
        return {path: _result(self.requests.pop(path), while_waiting) for path in paths}


def fetch_ahead(
    groups: Iterable[_Group],
    files_of: Callable[[_Group], Mapping[str, int]],
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Fetched[_Group]]:
    """Yield groups of files with their content, and fetch the next ones meanwhile. Local files are not read.

    Memory: the content of at most `_NUM_AHEAD` files or `_BYTES_AHEAD` bytes, and one group more.

    Args:
        groups: The groups.
        files_of: Returns the paths of a group, with the size of each file in bytes; 0 if it is unknown.
        while_waiting: Called every half second while a file is waited for.

    Raises:
        StorageError: The storage cannot be reached, or a file was replaced.
    """
    requested: deque[_RequestedGroup[_Group]] = deque()
    remaining = iter(groups)
    num_files = 0
    num_bytes = 0

    def fill() -> None:
        nonlocal num_files, num_bytes
        while not requested or (num_files < _NUM_AHEAD and num_bytes < _BYTES_AHEAD):
            try:
                group = next(remaining)
            except StopIteration:
                return
            sizes = {path: size for path, size in files_of(group).items() if not is_local(path)}
            requests = {path: _submit(partial(_content, path)) for path in sizes}
            requested.append(_RequestedGroup(group, sum(sizes.values()), requests))
            num_files += max(1, len(sizes))
            num_bytes += sum(sizes.values())

    try:
        fill()
        while requested:
            first = requested.popleft()
            num_files -= max(1, len(first.requests))
            num_bytes -= first.num_bytes
            fill()  # before the wait: a group may be as large as all that is fetched ahead
            yield Fetched(first.group, first.take_contents(while_waiting))
    finally:
        for group in requested:
            for request in group.requests.values():
                request.cancel()


def _result(future: "Future[_Result]", while_waiting: Callable[[], None]) -> _Result:
    while not future.done():
        if not wait([future], _POLL_SECONDS).done:
            while_waiting()
    return future.result()


def map_contents(
    function: Callable[[str, str | Content], _Result], paths: Iterable[str], num_threads: int
) -> Generator[_Result, None, None]:
    """Yield the result of a function for each file, in order. It is called in threads, on files that are fetched ahead.

    Args:
        function: Called with the path of a file, and its source for `open_source`.
        paths: The files.
        num_threads: Calls at a time, for example one for each core.

    Raises:
        StorageError: The storage cannot be reached, or a file was replaced.
    """

    def files_of(path: str) -> dict[str, int]:
        return {} if is_local(path) else {path: int(file_stats([path]).sizes[0])}

    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(num_threads) as threads:
        for fetched in fetch_ahead(paths, files_of):
            path = fetched.group
            waiting.append(threads.submit(function, path, fetched.contents.get(path, path)))
            # few, because an interruption waits for them
            if len(waiting) > _NUM_SUBMITTED * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def open_source(source: str | Content) -> BinaryIO:
    """Open a file by its path, or the content of one that was fetched.

    Raises:
        OSError: The file cannot be opened, or was not fetched.
    """
    if isinstance(source, OSError):
        raise source
    return open_file(source) if isinstance(source, str) else io.BytesIO(source)


def map_files(function: Callable[[str], _Result], paths: Iterable[str]) -> Iterator[_Result]:
    """Yield the result of a function for each file, in order. Files of object storage are read in threads, ahead."""
    waiting: deque[Future[_Result] | str] = deque()

    def result() -> _Result:
        first = waiting.popleft()
        return function(first) if isinstance(first, str) else first.result()

    for path in paths:
        waiting.append(path if is_local(path) else _submit(partial(function, path)))
        if isinstance(waiting[0], str) or len(waiting) > _NUM_AHEAD:
            yield result()
    while waiting:
        yield result()
