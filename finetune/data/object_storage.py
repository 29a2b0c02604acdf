"""Images and runs in object storage: S3 and compatible servers, Google Cloud and Azure Blob Storage, by obstore.

A folder of images is listed once: the paths, sizes, times and ETags of all objects in it. All questions about its files
are answered from this list. A file is read in one request that names the ETag of the list, so a replaced object is
noticed. Nothing is read outside of the listed folders, which commands have from the user. Runs are written and read
file by file (`runs.run_upload`, `runs.run_download`).

A client of obstore does not survive a fork: the child would hang. DataLoader workers therefore get the content of files
from the main process; see `fetching`.
"""

import errno
import io
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore import exceptions
from obstore.store import from_url

from finetune.data.addresses import SCHEMES, Address, StorageError, parse_address
from finetune.data.limits import MAX_BYTES
from finetune.data.storage import Entry, FileStats, Kind, Starts
from finetune.system.daemon_threads import start_in_thread
from finetune.system.messages import shown

# A request is repeated for this long if the server does not answer or reports an error of its own.
RETRY_SECONDS = 120.0
# The same for lists, with which a command starts: missing credentials look like a server that does not answer.
START_SECONDS = 15.0
_MAX_RETRIES = 1000  # the time ends first
# Seconds between two attempts.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_ANSWER_SECONDS = 30.0  # for one answer; a stalled request is repeated after it
_CONNECT_SECONDS = 5.0
# Parts of 5 MB of a file that are sent at the same time: on a slow line each must arrive within the time of an answer.
_PARTS = 4
_LATEST = 2**63 - 1  # ns; times are stored as int64, and some servers send the year 9999
_CHANGED = "mtime"  # metadata of an object: when the file was changed, in ns

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "HF_TOKEN",
    "https": "the address",
    "http": "the address",
}

_UNSUPPORTED_NAME = (
    "names with empty parts (//), '.' or '..' as a part, or control characters are unsupported"
)

_Result = TypeVar("_Result")
_forks = 0  # of this process and those it was forked from


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class RangesUnsupportedError(StorageError):
    """A server that sends a complete file where a part of it was requested."""


class Object(NamedTuple):
    """An object of a listing. `changed` is its time in ns, `e_tag` the identifier of its content."""

    size: int
    changed: int
    e_tag: str | None

    def times(self) -> tuple[int, int]:
        """Return the time, and a digest of the ETag, as the two times of a file."""
        digest = blake2b((self.e_tag or "").encode(), digest_size=8).digest()
        return self.changed, int.from_bytes(digest, "little", signed=True)


@dataclass
class Folder:
    """The names in a folder: its subfolders and files."""

    folders: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


class Tree:
    """All objects in a folder and its subfolders.

    Args:
        root: The folder, or a single file.
        objects: Objects by path.
        empty: Paths of folders without objects.
        commit: The commit of the folder; "" if its place has none.

    Attributes:
        results: Results about the contents of the objects, for `contents`.
    """

    def __init__(
        self, root: str, objects: dict[str, Object], empty: Iterable[str] = (), commit: str = ""
    ) -> None:
        self.root = root
        self.objects = objects
        self.commit = commit
        self.results: dict[str, Any] = {}
        self.folders: dict[str, Folder] = {}
        for path in empty:
            self._folder(path)
        for path in objects:
            if path == root:  # a file
                continue
            parent, _, name = path.rpartition("/")
            self._folder(parent).files.add(name)

    def _folder(self, path: str) -> Folder:
        folder = self.folders.get(path)
        if folder is None:
            folder = self.folders[path] = Folder()
            if path != self.root:
                parent, _, name = path.rpartition("/")
                self._folder(parent).folders.add(name)
        return folder

    def kind(self, path: str) -> Kind:
        if path in self.folders:
            return "folder"
        return "file" if path in self.objects else None

    def entries(self, path: str) -> Iterator[Entry]:
        folder = self.folders[path]
        for name in folder.folders:
            yield Entry(name, f"{path}/{name}", is_folder=True, is_link=False)
        for name in folder.files:
            inside = f"{path}/{name}"
            if name not in folder.folders or not self._is_mark(inside):
                yield Entry(name, inside, is_folder=False, is_link=False)

    def _is_mark(self, path: str) -> bool:
        """Return whether an object may mark a folder: some programs write an empty object of its name."""
        return self.objects[path].size == 0

    def parents_of_marks(self) -> set[str]:
        """Return the folders of empty objects that may each be the mark of an empty folder."""
        marks = (path for path in self.objects if self._is_mark(path) and path not in self.folders)
        return {path.rpartition("/")[0] for path in marks if path != self.root}


class ObjectStorage:
    """The buckets of one scheme. All methods may be used in threads, but not in forked workers."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, float], Any] = {}
        self._trees: dict[str, Tree] = {}
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
        self._trees.pop(tree.root, None)  # the newest listing comes last
        self._trees[tree.root] = tree

    def _list(self, address: Address) -> Tree:
        """Return all objects in a folder as they are now, or the single object of this address."""
        root = str(address)
        objects = self._objects_in(address)
        if not objects and address.key:
            item = self._head(address, START_SECONDS)
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
        store = self._client_of(address, START_SECONDS)
        objects: dict[str, Object] = {}

        def read_pages() -> None:
            objects.clear()
            for page in obstore.list(store, prefix=address.key or None, chunk_size=1000):
                for meta in page:
                    path = f"{place}/{meta['path']}"
                    if (
                        path != root
                    ):  # an empty object of the folder's name, which some programs write
                        objects[path] = _object(meta)

        self._ask(root, read_pages)
        return objects

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
        item = self._head(parse_address(path), START_SECONDS if is_start else RETRY_SECONDS)
        return None if item is None else item.e_tag

    def write(self, path: str, content: bytes | BinaryIO, changed: int) -> str | None:
        """Write an object, which replaces an earlier one at once when it is complete, and return its ETag.

        Args:
            path: Its address.
            content: The content. A file is read from its position, in parts, which need less memory.
            changed: The time of its last change in ns, which `download` gives to the file.
        """
        address = parse_address(path)
        store = self._client_of(address)
        start = 0 if isinstance(content, bytes) else content.tell()

        def put() -> str | None:
            if not isinstance(content, bytes):
                content.seek(start)  # for a repeated request
            result = obstore.put(
                store,
                address.key,
                content,
                attributes={_CHANGED: str(changed)},
                max_concurrency=_PARTS,
            )
            return result["e_tag"]

        return self._ask(str(address), put)

    def create(self, path: str, content: bytes) -> str | None:
        """Write a small object unless there is one, and return its ETag; None if there is another one.

        Of several processes that do so at the same time, one succeeds.
        """
        address = parse_address(path)
        store = self._client_of(address)

        def put() -> str | None:
            try:
                return obstore.put(store, address.key, content, mode="create")["e_tag"]
            except exceptions.AlreadyExistsError:
                # perhaps of this process, if the answer to a first request was lost
                result = obstore.get(store, address.key)
                is_own = bytes(result.bytes()) == content
                return result.meta["e_tag"] if is_own else None

        return self._ask(str(address), put)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within a bucket. The content is not sent again."""
        address = parse_address(source)
        store = self._client_of(address)
        key = parse_address(target).key
        self._ask(str(address), lambda: obstore.copy(store, address.key, key))

    def delete(self, path: str) -> None:
        """Delete an object, if there is one."""
        address = parse_address(path)
        store = self._client_of(address)
        with suppress(FileNotFoundError):
            self._ask(str(address), lambda: obstore.delete(store, address.key))

    def download(self, path: str, e_tag: str | None, target: Path) -> None:
        """Write the content of an object to a file, with the time of its last change if `write` has stored it.

        Raises:
            FileNotFoundError: There is no such object.
            StorageError: The storage cannot be reached, or the object has another ETag.
        """
        address = parse_address(path)
        store = self._client_of(address)
        options: Any = None if e_tag is None else {"if_match": e_tag}

        def read() -> str | None:
            result = obstore.get(store, address.key, options=options)
            with open(target, "wb") as file:
                for chunk in result.stream():
                    file.write(chunk)
            return result.attributes.get(_CHANGED)

        changed = self._ask(str(address), read)
        if changed is not None and changed.isdecimal():
            os.utime(target, ns=(int(changed), int(changed)))

    def kind(self, path: str) -> Kind:
        address = parse_address(path)
        path = str(address)
        tree = self._tree(path)
        if tree is not None:
            return tree.kind(path)
        if address.key and self._head(address, START_SECONDS) is not None:
            return "file"
        return "folder" if any(True for _ in self._names(address)) else None

    def entries(self, folder: str) -> Iterator[Entry]:
        address = parse_address(folder)
        path = str(address)
        tree = self._tree(path)
        if tree is None:
            return self._names(address)
        if path not in tree.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return tree.entries(path)

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        known = self._objects(paths)
        if not skip and None in known:
            missing = paths[known.index(None)]
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
        sizes = [-1 if item is None else item.size for item in known]
        times = [(-1, -1) if item is None else item.times() for item in known]
        return FileStats(
            np.array(sizes, np.int64),
            np.array(times, np.int64).reshape(-1, 2),
            np.array([item is not None for item in known], bool),
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
        store = self._client_of(address)

        def read() -> bytes:
            result = self._get(store, address, tree.objects.get(path))
            size = result.meta["size"]
            if size > MAX_BYTES:
                message = f"{size:,} bytes are more than the limit of {MAX_BYTES:,}"
                raise OSError(errno.EFBIG, message, path)
            return bytes(result.bytes())

        return self._ask(path, read)

    def _get(self, store: Any, address: Address, listed: Object | None) -> Any:
        """Return the answer to a request for an object. It fails if the object is not as it was listed."""
        options: Any = None if listed is None else {"if_match": listed.e_tag}
        return obstore.get(store, self._key(address), options=options)

    def _key(self, address: Address) -> str:
        """Return the name of an object for requests."""
        return address.key

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
            store = self._client_of(address)
            ranges = self._ask(
                path,
                lambda: obstore.get_ranges(
                    store,
                    self._key(address),
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

    def commit(self, path: str) -> str:
        tree = self._tree(self.normal(path))
        return "" if tree is None else tree.commit

    def _tree(self, path: str) -> Tree | None:
        """Return the newest listing that a path belongs to, if there is one."""
        for root, tree in reversed(list(self._trees.items())):
            if path == root or path.startswith(root + "/"):
                return tree
        return None

    def _objects(self, paths: Sequence[str]) -> list[Object | None]:
        """Return what is known of files; the common folder of those that no listing has is listed first."""
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
        store = self._client_of(address, seconds)
        try:
            return _object(self._ask(str(address), lambda: obstore.head(store, self._key(address))))
        except FileNotFoundError:
            return None

    def _names(self, address: Address) -> Iterator[Entry]:
        """Return the names in a folder that is not listed, without those in its subfolders."""
        store = self._client_of(address, START_SECONDS)
        result = self._ask(
            str(address), lambda: obstore.list_with_delimiter(store, address.key or None)
        )
        place = str(address._replace(key=""))
        for prefix in result["common_prefixes"]:
            yield Entry(prefix.rpartition("/")[2], f"{place}/{prefix}", True, False)
        for meta in result["objects"]:
            path = meta["path"]
            yield Entry(path.rpartition("/")[2], f"{place}/{path}", False, False)

    def _client_of(self, address: Address, seconds: float | None = None) -> Any:
        """Return the client of a bucket, which all threads share. It repeats failed requests for some seconds."""
        seconds = RETRY_SECONDS if seconds is None else seconds
        if self._forks != _forks:
            raise RuntimeError(
                "object storage was used before a fork and in the child: it would hang"
            )
        with self._lock:
            store = self._stores.get((address.bucket, seconds))
            if store is None:
                place = str(address._replace(key=""))
                store = self._ask(place, lambda: self._new_client(place, seconds))
                self._stores[address.bucket, seconds] = store
            return store

    def _new_client(self, place: str, seconds: float) -> Any:
        """Return a client of a bucket, with credentials and endpoint from the environment."""
        options = client_options(_is_http_allowed(place))
        return from_url(place, client_options=options, retry_config=retries_within(seconds))

    def _ask(self, path: str, request: Callable[[], _Result]) -> _Result:
        """Return the result of a request, with errors in plain words."""
        try:
            return interruptible(lambda: _repeated(request))
        except FileNotFoundError as error:
            if _is_bucket_missing(str(error)):
                raise StorageError(_bucket_missing(path)) from None
            if "status code: 405" in str(error):
                raise StorageError(
                    f"{path}: the server refuses HEAD requests, which return the sizes of images: allow them there, "
                    "or copy the images to a disk"
                ) from None
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        except exceptions.PreconditionError:
            message = f"{path} was replaced after its folder was listed (its ETag has changed)"
            raise StorageError(f"{message}: start again when nothing changes it") from None
        except exceptions.NotSupportedError as error:
            if "Range request not supported" not in str(error):
                raise StorageError(_in_plain_words(path, error)) from None
            raise RangesUnsupportedError(
                f"{path}: the server sends complete files only, without support for range requests, which a packed "
                "folder needs: copy the folder to a disk or to a server with range requests"
            ) from None
        except (exceptions.BaseError, PermissionError) as error:
            raise StorageError(_in_plain_words(path, error)) from None
        except ValueError as error:  # of a key with ".." or control characters
            if "Could not parse path" not in str(error):
                raise
            raise StorageError(f"{path}: {_UNSUPPORTED_NAME}") from None


def _repeated(request: Callable[[], _Result]) -> _Result:
    """Return the result of a request, which is repeated if its answer breaks off.

    obstore repeats requests that fail in other ways. If an answer breaks off, it requests the rest of an object's
    content, but not that of a list.
    """
    begin = time.monotonic()
    pause = _FIRST_PAUSE
    while True:
        try:
            return request()
        except exceptions.BaseError as error:
            if "response body" not in str(error) or time.monotonic() - begin > START_SECONDS:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def interruptible(request: Callable[[], _Result]) -> _Result:
    """Return the result of a request. In the main thread, Ctrl-C and other signals end the wait for it.

    While obstore waits for an answer, Python handles no signal, and requests are repeated for minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    return start_in_thread(request, "request").result()


def _object(meta: Mapping[str, Any]) -> Object:
    seconds = int(meta["last_modified"].timestamp())  # some requests have no fractions of a second
    changed = min(seconds * 10**9, _LATEST)
    return Object(meta["size"], changed, meta["e_tag"])


def client_options(is_http_allowed: bool) -> Any:
    """Return the options of a client of obstore."""
    options: Any = {
        "timeout": timedelta(seconds=_ANSWER_SECONDS),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
    }
    if is_http_allowed:
        options["allow_http"] = True
    return options


def retries_within(seconds: float) -> Any:
    """Return how a client of obstore repeats a failed request, for at most some seconds."""
    return {
        "max_retries": _MAX_RETRIES,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE),
            "max_backoff": timedelta(seconds=_LONGEST_PAUSE),
            "base": 2,
        },
    }


def _is_http_allowed(place: str) -> bool:
    """Return whether an endpoint without encryption is used: on this machine, or where the user allows it.

    Raises:
        StorageError: The endpoint is not encrypted, on another machine, and not allowed.
    """
    scheme = parse_address(place).scheme
    variable = next((name for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)
    if variable is None:
        return False
    endpoint = urlsplit(os.environ[variable])
    if endpoint.username or endpoint.password:
        raise StorageError(
            f"{variable} has a user name or password: remove it, and set {_VARIABLES[scheme]} instead"
        )
    if endpoint.scheme != "http":
        return False
    is_allowed = os.environ.get(_ALLOW_HTTP[scheme], "").lower() in ("1", "true")
    if is_allowed or _is_this_machine(endpoint.hostname or ""):
        return True
    raise StorageError(
        f"{place}: the endpoint http://{endpoint.hostname} ({variable}) is not encrypted: use https, or set "
        f"{_ALLOW_HTTP[scheme]}=true in a network that you trust"
    )


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_bucket_missing(text: str) -> bool:
    return any(
        word in text for word in ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
    )


def _bucket_missing(path: str) -> str:
    address = parse_address(path)
    place = str(address._replace(key=""))
    return f"the bucket {place} does not exist: check its name, and the endpoint and region"


def _in_plain_words(path: str, error: BaseException) -> str:
    """Return a message about an error of obstore. It has no URL, which may hold a token."""
    text = str(error).partition("\n\nDebug source:")[0]
    if _is_bucket_missing(text):
        return _bucket_missing(path)
    scheme = parse_address(path).scheme
    variables = _VARIABLES[scheme]
    code = re.search(r"<Code>([\w.]{1,50})</Code>", text)
    if code and code[1] == "InvalidObjectState":
        return f"{path} is in an archive class of the storage, such as Glacier: restore it first"
    # without credentials, those of a machine in the cloud are asked for
    words = _without_urls(text)
    is_lacking = "169.254." in text or re.search(
        "[Mm]etadata|Missing|must be specified|[Cc]redential", words
    )
    if scheme in SCHEMES and is_lacking:
        return f"{path}: no credentials: set {variables}"
    is_refused = isinstance(
        error, (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    )
    if is_refused or re.search(r"status code: 40[13]\b|AccessDenied|InvalidAccessKeyId", text):
        reason = f" ({code[1]})" if code else ""
        return f"{path}: access denied{reason}: check {variables}, and the permissions there"
    if isinstance(error, exceptions.InvalidPathError):
        match = re.search(r'Path "(.*)"(?: contained|: Encountered)', text, re.DOTALL)
        if match is None:
            return f"{path}: a name of an object is unsupported: {_without_urls(text)}"
        name = shown(match[1])
        return f"{path}: an object has the name {name!r}: {_UNSUPPORTED_NAME}. Rename or delete it"
    reason = _without_urls(text.partition(" - ")[2].partition("<")[0] or text).rstrip(": ")
    return f"{path}: the storage gives no answer, or an unexpected one ({reason})"


def _without_urls(text: str) -> str:
    return " ".join(re.sub(r"\w+://\S+", "", text).split())
