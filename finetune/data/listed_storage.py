"""Storage at addresses that lists a folder once and answers all questions about its files from this list.

A file is read in one request. If it was replaced since its folder was listed, this is an error; pieces of a file are
read without this check. Nothing is read outside of the listed folders, which commands have from the user.

A client of obstore does not survive a fork: the child would hang. DataLoader workers therefore get the content of files
from the main process; see `fetching`.
"""

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

import numpy as np
import obstore

from finetune.data import object_requests
from finetune.data.addresses import Address, parse_address
from finetune.data.file_entries import Entry, FileStats, Kind, Starts
from finetune.data.limits import MAX_BYTES
from finetune.data.object_tree import Object, Tree, listed_object

_Result = TypeVar("_Result")
_forks = 0  # of this process and those it was forked from


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class ListedStorage:
    """All places of one scheme: the base class of the kinds of storage that obstore reads.

    All methods may be used in threads, but not in forked workers. A derived class defines how a folder is listed
    (`_list`), and a client (`_new_client`).
    """

    def __init__(self) -> None:
        self._clients: dict[tuple[str, float], Any] = {}
        self._trees: dict[str, Tree] = {}  # the newest listing comes last
        self._lock = threading.Lock()
        self._forks = _forks

    def _list(self, address: Address) -> Tree:
        """Return all files in a folder as they are now, or the single file of this address."""
        raise NotImplementedError

    def _new_client(self, place: str, seconds: float) -> Any:
        """Return a client of obstore for a bucket. It repeats a failed request for some seconds."""
        raise NotImplementedError

    def normal(self, path: str) -> str:
        return str(parse_address(path))

    def absolute(self, path: str) -> str:
        return self.normal(path)

    def resolved(self, path: str) -> str:
        return self.normal(path)

    def refresh(self, folder: str) -> None:
        tree = self._list(parse_address(folder))
        self._trees.pop(tree.root, None)
        self._trees[tree.root] = tree

    def kind(self, path: str) -> Kind:
        path = self.normal(path)
        return self._tree_with(path).kind(path)

    def entries(self, folder: str) -> Iterator[Entry]:
        folder = self.normal(folder)
        tree = self._tree_with(folder)
        if folder not in tree.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return tree.entries(folder)

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        objects = self._objects(paths)
        if not skip and None in objects:
            missing = paths[objects.index(None)]
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
        sizes = [-1 if item is None else item.size for item in objects]
        times = [(-1, -1) if item is None else item.times() for item in objects]
        return FileStats(
            np.array(sizes, np.int64),
            np.array(times, np.int64).reshape(-1, 2),
            np.array([item is not None for item in objects], bool),
        )

    def open_file(self, path: str) -> BinaryIO:
        return io.BytesIO(self.content(path))

    def content(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: The file does not exist, is too large for an image, or is outside of the folders that were listed.
            StorageError: The storage cannot be reached, or the file was replaced since its folder was listed.
        """
        address = parse_address(path)
        path = str(address)
        tree = self._tree(path)
        if tree is None:
            # a path in an untrusted file, such as the predictions of a run
            raise PermissionError(
                errno.EACCES, "no folder that was searched holds this address", path
            )
        client = self._client_of(address)

        def read() -> bytes:
            result = self._get(client, address, tree.objects.get(path))
            size = result.meta["size"]
            if size > MAX_BYTES:
                message = f"{size:,} bytes are more than the limit of {MAX_BYTES:,}"
                raise OSError(errno.EFBIG, message, path)
            return bytes(result.bytes())

        return self._send(path, read)

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        address = parse_address(path)
        path = str(address)
        item = self._objects([path])[0]
        if item is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        size = item.size
        begins = [min(start, size) for start in starts(size)]
        ends = [min(begin + num_bytes, size) for begin in begins]
        # a request for no bytes is an error
        full = [i for i, begin in enumerate(begins) if ends[i] > begin]
        pieces = [b""] * len(begins)
        if full:
            client = self._client_of(address)
            ranges = self._send(
                path,
                lambda: obstore.get_ranges(
                    client,
                    address.key,
                    starts=[begins[i] for i in full],
                    ends=[ends[i] for i in full],
                ),
            )
            for i, piece in zip(full, ranges, strict=True):
                pieces[i] = bytes(piece)
        return size, pieces

    def results(self, path: str) -> dict[str, Any] | None:
        tree = self._tree(self.normal(path))
        return None if tree is None else tree.results

    def _tree(self, path: str) -> Tree | None:
        """Return the newest listing that a path belongs to, if there is one."""
        for root, tree in reversed(list(self._trees.items())):
            if path == root or path.startswith(root + "/"):
                return tree
        return None

    def _tree_with(self, path: str) -> Tree:
        """Return the newest listing that a path belongs to. The path is listed if there is none."""
        if self._tree(path) is None:
            self.refresh(path)
        tree = self._tree(path)
        assert tree is not None, "a path belongs to its own listing"
        return tree

    def _objects(self, paths: Sequence[str]) -> list[Object | None]:
        """Return files of listings; None for one that does not exist.

        Of the files without a listing, the common folder is listed first.
        """
        paths = [self.normal(path) for path in paths]
        unlisted = [path for path in paths if self._tree(path) is None]
        if len(set(unlisted)) == 1:
            self.refresh(unlisted[0])
            unlisted = []
        for bucket in {parse_address(path).bucket for path in unlisted}:
            inside = [path for path in unlisted if parse_address(path).bucket == bucket]
            scheme = parse_address(inside[0]).scheme
            folders = [os.path.dirname(parse_address(path).key) for path in inside]
            self.refresh(str(Address(scheme, bucket, os.path.commonpath(folders))))
        return [self._listed(path) for path in paths]

    def _listed(self, path: str) -> Object | None:
        tree = self._tree(path)
        return None if tree is None else tree.objects.get(path)

    def _head(self, address: Address, seconds: float) -> Object | None:
        """Return the file of an address as it is now, without a listing; None if it does not exist."""
        client = self._client_of(address, seconds)
        try:
            meta = self._send(str(address), lambda: obstore.head(client, address.key))
        except FileNotFoundError:
            return None
        return listed_object(meta)

    def _client_of(self, address: Address, seconds: float | None = None) -> Any:
        """Return the client of a bucket, which all threads share.

        Args:
            address: The bucket, or an address in it.
            seconds: How long it repeats a failed request; `RETRY_SECONDS` by default.
        """
        seconds = object_requests.RETRY_SECONDS if seconds is None else seconds
        if self._forks != _forks:
            raise RuntimeError(
                "object storage was used before a fork and in the child: it would hang"
            )
        with self._lock:
            client = self._clients.get((address.bucket, seconds))
            if client is None:
                place = str(address._replace(key=""))
                client = self._send(place, lambda: self._new_client(place, seconds))
                self._clients[address.bucket, seconds] = client
            return client

    def _get(self, client: Any, address: Address, listed: Object | None) -> Any:
        """Return the answer to a request for a file. It fails if the file is not as it was listed."""
        options: Any = None if listed is None else {"if_match": listed.e_tag}
        return obstore.get(client, address.key, options=options)

    def _send(self, path: str, request: Callable[[], _Result]) -> _Result:
        """Return the result of a request; see `object_requests.send`."""
        return object_requests.send(path, request)
