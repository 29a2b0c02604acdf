"""Object storage by obstore: objects are listed, read, written and deleted by their addresses, such as s3://bucket/key.

A request is repeated while the server does not answer. Credentials and endpoint come from environment variables.

A client of obstore does not survive a fork: the child would hang. So DataLoader workers read copies (see `mirror`).
obstore is imported in functions, since fits on local folders do not need it, and after the call of `_client`, which
says how to install it.
"""

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from finetune.data.addresses import Address, StorageError, check_address, parse_address
from finetune.system.daemon_threads import start_in_thread
from finetune.system.messages import shown

# A request is repeated for this long if the server does not answer or reports an error of its own.
RETRY_SECONDS = 120.0
# The same for requests with which a command starts: missing credentials look like a server that does not answer.
START_SECONDS = 15.0
_MAX_RETRIES = 1000  # the time ends first
# Seconds between two attempts.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_ANSWER_SECONDS = 30.0  # for one answer; a stalled request is repeated after it
_CONNECT_SECONDS = 5.0
# Parts of 5 MB of a file that are sent at the same time: on a slow line each must arrive within the time of an answer.
_PARTS = 4
_CHANGED = "mtime"  # metadata of an object: when the file that it was written from was changed
_LATEST = 2**63 - 1  # ns; times are stored as int64, and some servers send the year 9999


class _Cloud(NamedTuple):
    """The environment variables of a scheme: of credentials, of its endpoint, and the one that allows http."""

    credentials: str
    endpoints: tuple[str, ...]
    allow_http: str


_CLOUDS = {
    "s3": _Cloud(
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "AWS_ALLOW_HTTP",
    ),
    "gs": _Cloud("GOOGLE_APPLICATION_CREDENTIALS", ("GOOGLE_BASE_URL",), "GOOGLE_ALLOW_HTTP"),
    "az": _Cloud(
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "AZURE_ALLOW_HTTP",
    ),
}

# What obstore says, by regular expression, and what to do about it: the first that is found counts.
_FAULTS = (
    (
        "NoSuchBucket|ContainerNotFound|bucket does not exist",
        "the bucket does not exist: check its name, and the endpoint and region",
    ),
    (
        "InvalidObjectState",
        "it is in an archive class of the storage, such as Glacier: restore it first",
    ),
    (
        "builder error",
        "the endpoint is not encrypted: use https, or set {allow_http}=true in a network that you trust",
    ),
    # without credentials obstore asks for those of a virtual machine in a cloud, at 169.254.169.254
    (
        "metadata server|[Cc]redential|Missing|must be specified",
        "no credentials: set {credentials}",
    ),
    (
        r"status code: 40[13]\b|AccessDenied|InvalidAccessKeyId",
        "access denied ({reason}): check {credentials}, and the permissions there",
    ),
    (
        "",
        "the storage does not answer, or not as expected ({reason}): check the address and the network",
    ),
)

_Result = TypeVar("_Result")


class Object(NamedTuple):
    """An object of a listing. `changed` is its time in ns, `e_tag` the identifier of its content."""

    size: int
    changed: int
    e_tag: str | None

    def version(self) -> int:
        """Return a digest of the identifier of its content, of 64 bits."""
        identifier = self.e_tag or str(self.changed)
        digest = blake2b(identifier.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


_lock = threading.Lock()
_clients: dict[tuple[str, str, float], Any] = {}
_process: int | None = None  # that uses them


def endpoint_of(scheme: str) -> str:
    """Return the endpoint that the environment sets for a scheme; "" for that of its cloud."""
    return next(filter(None, map(os.environ.get, _CLOUDS[scheme].endpoints)), "")


def objects_in(folder: str) -> dict[str, Object]:
    """Return the objects in a folder and its subfolders, by their names in it."""
    objects: dict[str, Object] = {}

    def read_pages(obstore: Any, client: Any, key: str) -> None:
        objects.clear()
        prefix = f"{key}/" if key else ""
        for page in obstore.list(client, prefix=key or None, chunk_size=1000):
            for meta in page:
                # some programs write an empty object of the folder's name
                if meta["path"] != key:
                    objects[meta["path"].removeprefix(prefix)] = _object(meta)

    _send(folder, read_pages, START_SECONDS)
    return objects


def folders_in(folder: str) -> list[str]:
    """Return the names of the subfolders of a folder."""
    result = _send(
        folder,
        lambda obstore, client, key: obstore.list_with_delimiter(client, key or None),
        START_SECONDS,
    )
    return [prefix.rpartition("/")[2] for prefix in result["common_prefixes"]]


def head(path: str, is_start: bool = False) -> Object | None:
    """Return what the storage knows of an object; None if there is none.

    Args:
        path: Its address.
        is_start: Whether a command begins with this request, which is then not repeated for long.
    """
    seconds = START_SECONDS if is_start else None
    try:
        return _object(_send(path, lambda obstore, client, key: obstore.head(client, key), seconds))
    except FileNotFoundError:
        return None


def read(path: str, e_tag: str | None, start: int = 0, num_bytes: int | None = None) -> bytes:
    """Return the content of an object, or a range of it that is not empty.

    Raises:
        FileNotFoundError: There is no such object.
        StorageError: The storage cannot be reached, or the object has another ETag.
    """
    options = _of_version(e_tag)
    if num_bytes is not None:
        options["range"] = (start, start + num_bytes)
    return _send(
        path,
        lambda obstore, client, key: bytes(obstore.get(client, key, options=options).bytes()),
    )


def download(path: str, e_tag: str | None, target: Path) -> None:
    """Write the content of an object to a file, with the time of its last change if its metadata have it.

    For errors see `read`.
    """

    def write_file(obstore: Any, client: Any, key: str) -> Any:
        result = obstore.get(client, key, options=_of_version(e_tag))
        with open(target, "wb") as file:
            for chunk in result.stream():
                file.write(chunk)
        return result.attributes.get(_CHANGED)

    changed = _send(path, write_file)
    if changed is not None and changed.isdecimal():
        os.utime(target, ns=(int(changed), int(changed)))


def write(path: str, content: bytes | BinaryIO, changed: int) -> str | None:
    """Write an object, which replaces an earlier one at once when it is complete, and return its ETag.

    Args:
        path: Its address.
        content: The content. A file is read from its position, in parts, which need less memory.
        changed: The time of its last change in ns, which `download` gives to the file.
    """
    start = 0 if isinstance(content, bytes) else content.tell()
    attributes = {_CHANGED: str(changed)}

    def put(obstore: Any, client: Any, key: str) -> Any:
        if not isinstance(content, bytes):
            content.seek(start)  # for a repeated request
        return obstore.put(client, key, content, attributes=attributes, max_concurrency=_PARTS)

    return _send(path, put)["e_tag"]


def create(path: str, content: bytes) -> str | None:
    """Write a small object unless there is one, and return its ETag; None if there is another one.

    Of several processes that do so at the same time, one succeeds.
    """

    def put(obstore: Any, client: Any, key: str) -> Any:
        try:
            return obstore.put(client, key, content, mode="create")["e_tag"]
        except obstore.exceptions.AlreadyExistsError:
            # perhaps of this process, if the answer to a first request was lost
            result = obstore.get(client, key)
            is_own = bytes(result.bytes()) == content
            return result.meta["e_tag"] if is_own else None

    return _send(path, put)


def copy(source: str, target: str) -> None:
    """Copy an object within a bucket. The content is not sent again."""
    new = parse_address(target).key
    _send(source, lambda obstore, client, key: obstore.copy(client, key, new))


def delete(path: str) -> None:
    """Delete an object, if there is one."""
    with suppress(FileNotFoundError):
        _send(path, lambda obstore, client, key: obstore.delete(client, key))


def _of_version(e_tag: str | None) -> dict[str, Any]:
    """Return the options of a request for an object: it fails if the object was replaced."""
    return {} if e_tag is None else {"if_match": e_tag}


def _object(meta: Mapping[str, Any]) -> Object:
    """Return an object from its description by obstore."""
    seconds = int(meta["last_modified"].timestamp())  # some requests have no fractions of a second
    changed = min(seconds * 10**9, _LATEST)
    return Object(meta["size"], changed, meta["e_tag"])


def _client(address: Address, seconds: float) -> Any:
    """Return the client of the bucket of an address, which all threads share. It repeats failed requests so long."""
    global _process
    place = str(address._replace(key=""))
    key = (place, endpoint_of(address.scheme), seconds)
    with _lock:
        if _process not in (None, os.getpid()):
            raise RuntimeError("object storage was used before a fork: the child would hang")
        _process = os.getpid()
        if key not in _clients:
            from obstore.store import from_url

            allow_http = os.environ.get(_CLOUDS[address.scheme].allow_http, "").lower()
            _clients[key] = from_url(
                place,
                client_options={
                    "timeout": timedelta(seconds=_ANSWER_SECONDS),
                    "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                    "allow_http": allow_http in ("1", "true"),
                },
                retry_config={
                    "max_retries": _MAX_RETRIES,
                    "retry_timeout": timedelta(seconds=seconds),
                    "backoff": {
                        "init_backoff": timedelta(seconds=_FIRST_PAUSE),
                        "max_backoff": timedelta(seconds=_LONGEST_PAUSE),
                        "base": 2,
                    },
                },
            )
        return _clients[key]


def _send(
    path: str, request: Callable[[Any, Any, str], _Result], seconds: float | None = None
) -> _Result:
    """Return the result of a request, with errors in plain words.

    In the main thread Ctrl-C and other signals end the wait for it: while obstore waits, Python handles no signal.

    Args:
        path: The address that is requested.
        request: Called with the module obstore, the client of the bucket and the key.
        seconds: How long a failed request is repeated; `RETRY_SECONDS` by default.

    Raises:
        WrongUsage: The address is invalid, or the package for object storage is not installed.
        FileNotFoundError: There is no such object.
        StorageError: The storage cannot be reached or refuses access, or the object was replaced.
    """
    address = parse_address(path)
    check_address(path)
    import obstore

    longest = RETRY_SECONDS if seconds is None else seconds

    def ask() -> _Result:
        client = _client(address, longest)
        return _repeated(lambda: request(obstore, client, address.key), longest)

    try:
        if threading.current_thread() is not threading.main_thread():
            return ask()
        return start_in_thread(ask, "request").result()
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise error_in_words(str(address), error) from None


def _repeated(request: Callable[[], _Result], seconds: float) -> _Result:
    """Return the result of a request, which is repeated so long if its answer breaks off or is not HTTP.

    obstore repeats requests that fail in other ways. If an answer breaks off, it requests the rest of an object's
    content, but not that of a list.
    """
    from obstore import exceptions

    begin = time.monotonic()
    pause = _FIRST_PAUSE
    while True:
        try:
            return request()
        except exceptions.BaseError as error:
            is_repeated = re.search("response body|error sending request", str(error))
            if not is_repeated or time.monotonic() - begin > seconds:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def replaced(path: str, what: str) -> StorageError:
    """Return the error of an object that has changed since it was listed, by its ETag or size."""
    message = f"{path} was replaced after its folder was listed (its {what} has changed)"
    return StorageError(f"{message}: start again when nothing changes it")


def error_in_words(path: str, error: Exception) -> Exception:
    """Return the error of a request for an address, from that of obstore. It has no URL, which may hold a token."""
    from obstore import exceptions

    if isinstance(error, OSError) and error.errno is not None:  # of the local disk
        return error
    if isinstance(error, exceptions.PreconditionError):
        return replaced(path, "ETag")
    text = str(error).partition("\n\nDebug source:")[0]
    if isinstance(error, exceptions.InvalidPathError) or "Could not parse path" in text:
        return StorageError(
            f"{path}: {shown(text)}: such names are unsupported. Rename or delete it"
        )
    # What comes before has the name of the object, which may contain any of the words; then comes a URL, which has it.
    text = text.rpartition("Error performing ")[2].replace("//169.254.", "metadata server //")
    text = " ".join(re.sub(r"\w+://\S+", "", text).split())
    if isinstance(error, FileNotFoundError) and not re.search(_FAULTS[0][0], text):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    words = next(words for pattern, words in _FAULTS if re.search(pattern, text))
    code = re.search(r"<Code>([\w.]{1,50})</Code>", text)
    reason = code[1] if code else text.partition("<")[0].rpartition(" - ")[2].rstrip(": ")
    cloud = _CLOUDS[parse_address(path).scheme]
    return StorageError(f"{path}: {words.format(reason=reason, **cloud._asdict())}")
