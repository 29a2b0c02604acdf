"""Fetches the content of files at addresses before it is needed, in threads of the main process.

Clients of object storage, of the hub and of web servers do not survive a fork, so DataLoader workers cannot read from
there. The main process sends them the content of the files with the indices of a batch. Errors of the storage are
raised in the main process.
"""

import io
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from finetune.data.storage import Place, file_stats, is_local, open_file, pack_of
from finetune.system.daemon_threads import complete

_NUM_THREADS = 128  # requests at a time; each waits for the network most of its time
_NUM_AHEAD = 256  # files that are fetched ahead, at least one group
_BYTES_AHEAD = 256 * 2**20  # of these files, as far as their sizes are known

# Of packed folders: how far to look ahead for neighbours in a shard, which are read together.
_NUM_PLANNED = 4096
_BYTES_PLANNED = 32 * 2**20
# Bytes between two neighbours, at most, plus the size of the second. Sending a request takes about as long as reading
# so many bytes. Of large images, at most about half of the bytes are not needed.
_GAP = 32 * 2**10

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


def _contents(path: str) -> list[Content]:
    try:
        with open_file(path) as file:
            return [file.read()]
    except OSError as error:  # of this file only, and reported when it is decoded
        return [error]


@dataclass(frozen=True)
class Fetched(Generic[_Group]):
    """A group of files, and the content of those that are not on a local disk, by path."""

    group: _Group
    contents: dict[str, Content]


class _Request(NamedTuple):
    """The request for a file. It may be a request for several files.

    Attributes:
        contents: The content of its files.
        position: The position of this file among them.
    """

    contents: Future[list[Content]]
    position: int


@dataclass(eq=False)
class _PlannedGroup(Generic[_Group]):
    """A group of files that will be needed, and the requests for those of them that were sent.

    Attributes:
        group: The group.
        sizes: Size of each of its files in object storage in bytes, by path; 0 if it is unknown.
        places: Where those in packed folders are.
        requests: The requests for its files that were sent, by path.
    """

    group: _Group
    sizes: dict[str, int]
    places: dict[str, Place]
    requests: dict[str, _Request] = field(default_factory=dict)

    def take_contents(self, while_waiting: Callable[[], None]) -> dict[str, Content]:
        """Wait for the files and return the content of each. It is then in the memory of the caller only."""
        taken: dict[str, Content] = {}
        for path in self.sizes:
            request = self.requests.pop(path)
            contents = _result(request.contents, while_waiting)
            taken[path] = contents[request.position]
            contents[request.position] = b""
        return taken


class _PackedFile(NamedTuple):
    """A file in a packed folder that a group needs."""

    place: Place
    path: str
    needed_by: _PlannedGroup[Any]

    def size(self) -> int:
        return self.place.end - self.place.begin


class _Plan(Generic[_Group]):
    """The groups after those that are being fetched: a look ahead for files that are neighbours in a shard.

    Neighbours are requested together, although only the group of one of them is needed now.

    Args:
        groups: The groups.
        files_of: See `fetch_ahead`.
        num_groups: See `fetch_ahead`.
    """

    def __init__(
        self,
        groups: Iterable[_Group],
        files_of: Callable[[_Group], Mapping[str, int]],
        num_groups: int,
    ) -> None:
        self.planned: deque[_PlannedGroup[_Group]] = deque()
        self._groups = iter(groups)
        self._files_of = files_of
        self._num_groups = num_groups
        self._num_files = 0
        self._num_bytes = 0
        # the packed files of planned groups that are not requested yet, by their block
        self._blocks: defaultdict[tuple[str, int], list[_PackedFile]] = defaultdict(list)

    def take(self) -> _PlannedGroup[_Group] | None:
        """Return the next group, with all its files requested; None after the last group."""
        while self._needs_group():
            try:
                group = next(self._groups)
            except StopIteration:
                break
            self._append(group)
        if not self.planned:
            return None
        first = self.planned.popleft()
        self._num_files -= len(first.sizes)
        self._num_bytes -= sum(first.sizes.values())
        for path in first.sizes:
            if path not in first.requests:
                self._request(first, path)
        return first

    def _needs_group(self) -> bool:
        """Return whether to look at another group for neighbours of the planned files."""
        if len(self.planned) < self._num_groups:
            return True
        # only files in packed folders have neighbours
        is_packed = bool(self.planned[-1].places)
        return is_packed and self._num_files < _NUM_PLANNED and self._num_bytes < _BYTES_PLANNED

    def _append(self, group: _Group) -> None:
        """Plan a group: look up its files, but request none."""
        sizes = {path: n for path, n in self._files_of(group).items() if not is_local(path)}
        places: dict[str, Place] = {}
        for path in sizes:
            pack = pack_of(path)
            place = None if pack is None else pack.place(path)
            if place is not None:
                places[path] = place
        planned = _PlannedGroup(group, sizes, places)
        for path, place in places.items():
            self._blocks[place.block].append(_PackedFile(place, path, planned))
        self.planned.append(planned)
        self._num_files += len(sizes)
        self._num_bytes += sum(sizes.values())

    def _request(self, planned: _PlannedGroup[_Group], path: str) -> None:
        """Request a file, with its neighbours that a planned group needs."""
        place = planned.places.get(path)
        if place is None:
            planned.requests[path] = _Request(_submit(partial(_contents, path)), 0)
            return
        block = self._blocks.pop(place.block)
        together = _neighbours(block, _PackedFile(place, path, planned))
        paths = [file.path for file in together]
        future = _submit(partial(_packed_contents, paths))
        for i, file in enumerate(together):
            file.needed_by.requests[file.path] = _Request(future, i)
        rest = [file for file in block if file.path not in file.needed_by.requests]
        if rest:
            self._blocks[place.block] = rest


def _neighbours(files: list[_PackedFile], wanted: _PackedFile) -> list[_PackedFile]:
    """Return the files of one block that are read together with one of them, which is among them."""
    together: list[_PackedFile] = []
    end = 0
    for file in sorted(files, key=lambda file: file.place.begin):
        if together and file.place.begin - end > _GAP + file.size():
            if wanted in together:
                break
            together = []
        together.append(file)
        end = max(end, file.place.end)
    return together


def _packed_contents(paths: list[str]) -> list[Content]:
    pack = pack_of(paths[0])
    assert pack is not None, "a pack stays in use"
    return [*pack.contents(paths)]


def fetch_ahead(
    groups: Iterable[_Group],
    files_of: Callable[[_Group], Mapping[str, int]],
    while_waiting: Callable[[], None] = lambda: None,
    num_planned: int = 1,
) -> Iterator[Fetched[_Group]]:
    """Yield groups of files with their content, and fetch the next ones meanwhile. Local files are not read.

    Files that are neighbours in a shard of a packed folder are read by one request, if planned groups need them.

    Memory: the content of at most `_NUM_AHEAD` files or `_BYTES_AHEAD` bytes, and one group more. Of a packed folder,
    also that of files of planned groups: at most `_NUM_PLANNED` or `_BYTES_PLANNED`, or those of `num_planned` groups.

    Args:
        groups: The groups.
        files_of: Returns the paths of a group, with the size of each file in bytes; 0 if it is unknown.
        while_waiting: Called every half second while a file is waited for.
        num_planned: How many groups to look at, at least, after those that are fetched, for neighbours in shards.

    Raises:
        StorageError: The storage cannot be reached, or a file was replaced.
    """
    requested: deque[_PlannedGroup[_Group]] = deque()
    plan = _Plan(groups, files_of, num_planned)
    num_files = 0
    num_bytes = 0

    def fill() -> None:
        nonlocal num_files, num_bytes
        while not requested or (num_files < _NUM_AHEAD and num_bytes < _BYTES_AHEAD):
            group = plan.take()
            if group is None:
                return
            requested.append(group)
            num_files += max(1, len(group.sizes))
            num_bytes += sum(group.sizes.values())

    try:
        fill()
        while requested:
            first = requested.popleft()
            num_files -= max(1, len(first.sizes))
            num_bytes -= sum(first.sizes.values())
            fill()  # before the wait: a group may be as large as all that is fetched ahead
            yield Fetched(first.group, first.take_contents(while_waiting))
    finally:
        for group in (*requested, *plan.planned):
            for request in group.requests.values():
                request.contents.cancel()


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
