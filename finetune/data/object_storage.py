"""Images and runs in object storage: S3 and compatible servers, Google Cloud and Azure Blob Storage, by obstore.

A folder of images is listed once: the paths, sizes, times and ETags of all objects in it. All questions about its files
are answered from this list. A file is read in one request. If it was replaced since its folder was listed, this is an
error; pieces of a file are read without this check. Nothing is read outside of the listed folders, which commands have
from the user. Runs are written and read file by file (`runs.run_upload`, `runs.run_download`).

A client of obstore does not survive a fork: the child would hang. DataLoader workers therefore get the content of files
from the main process; see `fetching`.
"""

import errno
import io
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import obstore
from obstore import exceptions

from finetune.data import object_requests
from finetune.data.addresses import Address, parse_address
from finetune.data.file_entries import Entry, FileStats, Kind, Starts
from finetune.data.limits import MAX_BYTES
from finetune.data.object_tree import Object, Tree, listed_object

# Parts of 5 MB of a file that are sent at the same time: on a slow line each must arrive within the time of an answer.
_PARTS = 4
_CHANGED = "mtime"  # metadata of an object: when the file was changed, in ns
_forks = 0  # of this process and those it was forked from


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class ObjectStorage:
    """The buckets of one scheme. All methods may be used in threads, but not in forked workers."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, float], Any] = {}
        self._trees: dict[str, Tree] = {}  # the newest listing comes last
        self._lock = threading.Lock()
        self._forks = _forks

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

        return object_requests.send(path, read)

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
            ranges = object_requests.send(
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
            meta = object_requests.send(str(address), lambda: obstore.head(client, address.key))
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
                client = object_requests.send(
                    place, lambda: object_requests.new_client(place, seconds)
                )
                self._clients[address.bucket, seconds] = client
            return client

    def _get(self, client: Any, address: Address, listed: Object | None) -> Any:
        """Return the answer to a request for a file. It fails if the file is not as it was listed."""
        options: Any = None if listed is None else {"if_match": listed.e_tag}
        return obstore.get(client, address.key, options=options)

    def _list(self, address: Address) -> Tree:
        """Return all objects in a folder as they are now, or the single object of this address."""
        root = str(address)
        objects = self._objects_in(address)
        if not objects and address.key:
            item = self._head(address, object_requests.START_SECONDS)
            if item is not None:
                objects[root] = item
        tree = Tree(root, objects)
        # The name of a mark ends with a slash, which only the listing of a single folder shows.
        marks = {
            entry.path
            for parent in tree.parents_of_marks()
            for entry in self._names(parse_address(parent))
            if entry.is_folder and entry.path not in tree.folders
        }
        if marks:
            others = {path: item for path, item in objects.items() if path not in marks}
            tree = Tree(root, others, marks)
        return tree

    def _objects_in(self, address: Address) -> dict[str, Object]:
        """Return the objects in a folder and its subfolders, by path."""
        root = str(address)
        place = str(address._replace(key=""))
        client = self._client_of(address, object_requests.START_SECONDS)
        objects: dict[str, Object] = {}

        def read_pages() -> None:
            objects.clear()
            for page in obstore.list(client, prefix=address.key or None, chunk_size=1000):
                for meta in page:
                    path = f"{place}/{meta['path']}"
                    # some programs write an empty object of the folder's name
                    if path != root:
                        objects[path] = listed_object(meta)

        object_requests.send(root, read_pages)
        return objects

    def kind(self, path: str) -> Kind:
        address = parse_address(path)
        tree = self._tree(str(address))
        if tree is not None:
            return tree.kind(str(address))
        if address.key and self._head(address, object_requests.START_SECONDS) is not None:
            return "file"
        return "folder" if any(True for _ in self._names(address)) else None

    def entries(self, folder: str) -> Iterator[Entry]:
        address = parse_address(folder)
        tree = self._tree(str(address))
        if tree is None:
            return self._names(address)
        if str(address) not in tree.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(address))
        return tree.entries(str(address))

    def _names(self, address: Address) -> Iterator[Entry]:
        """Return the names in a folder that is not listed, without those in its subfolders."""
        client = self._client_of(address, object_requests.START_SECONDS)
        result = object_requests.send(
            str(address), lambda: obstore.list_with_delimiter(client, address.key or None)
        )
        place = str(address._replace(key=""))
        for prefix in result["common_prefixes"]:
            yield Entry(prefix.rpartition("/")[2], f"{place}/{prefix}", True, False)
        for meta in result["objects"]:
            path = meta["path"]
            yield Entry(path.rpartition("/")[2], f"{place}/{path}", False, False)

    def files_in(self, folder: str) -> dict[str, Object]:
        """Return the objects in a folder and its subfolders as they are now, by path relative to the folder."""
        root = self.normal(folder)
        objects = self._objects_in(parse_address(folder))
        return {path.removeprefix(f"{root}/"): item for path, item in objects.items()}

    def folders_in(self, folder: str) -> list[str]:
        """Return the names of the subfolders of a folder as they are now."""
        return [entry.name for entry in self._names(parse_address(folder)) if entry.is_folder]

    def e_tag(self, path: str, is_start: bool = False) -> str | None:
        """Return the identifier of the content of an object; None if there is no such object.

        Args:
            path: Its address.
            is_start: Whether a command begins with this request, which is then not repeated for long.
        """
        seconds = object_requests.START_SECONDS if is_start else object_requests.RETRY_SECONDS
        item = self._head(parse_address(path), seconds)
        return None if item is None else item.e_tag

    def write(self, path: str, content: bytes | BinaryIO, changed: int) -> str | None:
        """Write an object, which replaces an earlier one at once when it is complete, and return its ETag.

        Args:
            path: Its address.
            content: The content. A file is read from its position, in parts, which need less memory.
            changed: The time of its last change in ns, which `download` gives to the file.
        """
        address = parse_address(path)
        client = self._client_of(address)
        start = 0 if isinstance(content, bytes) else content.tell()

        def put() -> str | None:
            if not isinstance(content, bytes):
                content.seek(start)  # for a repeated request
            result = obstore.put(
                client,
                address.key,
                content,
                attributes={_CHANGED: str(changed)},
                max_concurrency=_PARTS,
            )
            return result["e_tag"]

        return object_requests.send(str(address), put)

    def create(self, path: str, content: bytes) -> str | None:
        """Write a small object unless there is one, and return its ETag; None if there is another one.

        Of several processes that do so at the same time, one succeeds.
        """
        address = parse_address(path)
        client = self._client_of(address)

        def put() -> str | None:
            try:
                return obstore.put(client, address.key, content, mode="create")["e_tag"]
            except exceptions.AlreadyExistsError:
                # perhaps of this process, if the answer to a first request was lost
                result = obstore.get(client, address.key)
                is_own = bytes(result.bytes()) == content
                return result.meta["e_tag"] if is_own else None

        return object_requests.send(str(address), put)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within a bucket. The content is not sent again."""
        address = parse_address(source)
        client = self._client_of(address)
        key = parse_address(target).key
        object_requests.send(str(address), lambda: obstore.copy(client, address.key, key))

    def delete(self, path: str) -> None:
        """Delete an object, if there is one."""
        address = parse_address(path)
        client = self._client_of(address)
        with suppress(FileNotFoundError):
            object_requests.send(str(address), lambda: obstore.delete(client, address.key))

    def download(self, path: str, e_tag: str | None, target: Path) -> None:
        """Write the content of an object to a file, with the time of its last change if `write` has stored it.

        Raises:
            FileNotFoundError: There is no such object.
            StorageError: The storage cannot be reached, or the object has another ETag.
        """
        address = parse_address(path)
        client = self._client_of(address)
        options: Any = None if e_tag is None else {"if_match": e_tag}

        def read() -> str | None:
            result = obstore.get(client, address.key, options=options)
            with open(target, "wb") as file:
                for chunk in result.stream():
                    file.write(chunk)
            return result.attributes.get(_CHANGED)

        changed = object_requests.send(str(address), read)
        if changed is not None and changed.isdecimal():
            os.utime(target, ns=(int(changed), int(changed)))
