"""Object storage by obstore: objects are listed, read, written and deleted by their addresses, such as s3://bucket/key.

obstore repeats a request while the server does not answer. Credentials and endpoint come from environment variables.

A client of obstore does not survive a fork: the child would hang. So DataLoader workers read copies (see `mirror`).
obstore is imported in functions, since fits on local folders do not need it.
"""

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

from finetune.data.addresses import Address, StorageError, parse_address
from finetune.system.daemon_threads import start_in_thread
from finetune.system.messages import shown

# A request is repeated for this long if the server does not answer or reports an error of its own.
RETRY_SECONDS = 120.0
# The same for requests with which a command starts: missing credentials look like a server that does not answer.
START_SECONDS = 15.0
_PAUSE = 0.5  # seconds, before a request that obstore does not repeat is repeated
_OPTIONS: Any = {
    "timeout": timedelta(seconds=30),  # for one answer; a stalled request is repeated after it
    "connect_timeout": timedelta(seconds=5),
}
_RETRIES: Any = {
    "max_retries": 1000,  # the time ends first
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}
# Parts of 5 MB of a file that are sent at the same time: on a slow line each must arrive within the time of an answer.
_PARTS = 4
_CHANGED = "mtime"  # metadata of an object: when the file that it was written from was changed
_LATEST = 2**63 - 1  # ns; times are stored as int64, and some servers send the year 9999

# How the environment variables of a scheme begin, and those of its credentials.
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

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


def endpoint_of(scheme: str) -> str:
    """Return the endpoint that the environment sets for a scheme, with its variable; "" for that of its cloud."""
    pattern = re.compile(rf"{_VARIABLES[scheme]}_\w*(ENDPOINT|BASE_URL)\w*")
    return " ".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if pattern.fullmatch(name)
    )


def objects_in(folder: str) -> dict[str, Object]:
    """Return the objects in a folder and its subfolders, by their names in it."""

    def read_pages(obstore: Any, client: Any, key: str) -> dict[str, Object]:
        prefix = f"{key}/" if key else ""
        return {
            meta["path"].removeprefix(prefix): _object(meta)
            for page in obstore.list(client, prefix=key or None, chunk_size=1000)
            for meta in page
            # some programs write an empty object of the folder's name
            if meta["path"] != key
        }

    return _send(folder, read_pages, START_SECONDS)


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
    place = str(address._replace(key=""))
    key = (place, endpoint_of(address.scheme), seconds)
    with _lock:
        if key not in _clients:
            from obstore.store import from_url

            allow_http = os.environ.get(f"{_VARIABLES[address.scheme]}_ALLOW_HTTP", "").lower()
            _clients[key] = from_url(
                place,
                client_options={**_OPTIONS, "allow_http": allow_http in ("1", "true")},
                retry_config={**_RETRIES, "retry_timeout": timedelta(seconds=seconds)},
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
        WrongUsage: The address is invalid.
        FileNotFoundError: There is no such object.
        StorageError: The storage cannot be reached or refuses access, or the object was replaced.
    """
    address = parse_address(path)
    import obstore

    def ask() -> _Result:
        longest = RETRY_SECONDS if seconds is None else seconds
        client = _client(address, longest)
        end = time.monotonic() + longest
        while True:
            try:
                return request(obstore, client, address.key)
            except obstore.exceptions.GenericError as error:
                # An answer has broken off, or was not HTTP. obstore requests the rest of an object, but not of a list.
                is_repeated = re.search("response body|error sending request", str(error))
                if not is_repeated or time.monotonic() > end:
                    raise
            time.sleep(_PAUSE)

    try:
        if threading.current_thread() is not threading.main_thread():
            return ask()
        return start_in_thread(ask, "request").result()
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise _in_words(address, error) from None


def replaced(path: str, what: str) -> StorageError:
    """Return the error of an object that has changed since it was listed, by its ETag or size."""
    message = f"{path} was replaced after its folder was listed (its {what} has changed)"
    return StorageError(f"{message}: start again when nothing changes it")


def _in_words(address: Address, error: Exception) -> Exception:
    """Return the error of a request for an address, from that of obstore. It has no URL, which may hold a token."""
    from obstore import exceptions

    path = str(address)
    if re.search("<Code>(NoSuchBucket|ContainerNotFound)</Code>", str(error)):
        advice = "check its name, and the endpoint and region"
        return StorageError(f"{path}: the bucket does not exist: {advice}")
    # of a list obstore says so in words only
    if isinstance(error, FileNotFoundError) or "status code: 404" in str(error):
        return FileNotFoundError(f"{path!r} does not exist")
    if isinstance(error, OSError) and error.errno is not None:  # of the local disk
        return error
    if isinstance(error, exceptions.PreconditionError):
        return replaced(path, "ETag")
    text = str(error).partition("\n\nDebug source:")[0]
    if isinstance(error, exceptions.InvalidPathError) or "Could not parse path" in text:
        return StorageError(
            f"{path}: {shown(text)}: such names are unsupported. Rename or delete it"
        )
    credentials = _CREDENTIALS[address.scheme]
    text = re.sub(r"\w+://\S+", "", text).partition("<")[0]
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(error, denied) or re.search(r"status code: 40[13]\b", text):
        return StorageError(
            f"{path}: access denied: check {credentials}, and the permissions there"
        )
    if "builder error" in text:
        flag = f"{_VARIABLES[address.scheme]}_ALLOW_HTTP"
        advice = f"use https, or set {flag}=true in a network that you trust"
        return StorageError(f"{path}: the endpoint is not encrypted: {advice}")
    reason = " ".join(text.split()).rpartition(" - ")[2].rstrip(": ")
    return StorageError(
        f"{path}: the storage does not answer, or not as expected ({reason}): check the address, the network, and "
        f"{credentials}"
    )
