"""A client of object storage by obstore: lists, heads and contents of objects, retries, and errors in plain words.

A client of obstore does not survive a fork: the child would hang. So DataLoader workers read copies (see `mirror`).
obstore is imported in functions, since fits on local folders do not need it, and after the call of `client_of`, which
says how to install it.
"""

import errno
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from finetune.data.addresses import Address, StorageError, check_address, parse_address
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

# The environment variables that set the endpoint of each scheme.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
# What a message about missing or refused credentials names.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

CHANGED = (
    "mtime"  # metadata of an object: when the file that it was written from was changed, in ns
)
_LATEST = 2**63 - 1  # ns; times are stored as int64, and some servers send the year 9999

_UNSUPPORTED_NAME = (
    "names with empty parts (//), '.' or '..' as a part, or control characters are unsupported"
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


def client_of(address: Address, seconds: float | None = None) -> Any:
    """Return the client of a bucket, which all threads share. Credentials and endpoint come from the environment.

    Args:
        address: The bucket, or an address in it.
        seconds: How long it repeats a failed request; `RETRY_SECONDS` by default.

    Raises:
        WrongUsage: The package for object storage is not installed.
        StorageError: The endpoint is not encrypted, on another machine, and not allowed.
    """
    global _process
    seconds = RETRY_SECONDS if seconds is None else seconds
    place = str(address._replace(key=""))
    key = (place, endpoint_of(address.scheme), seconds)
    with _lock:
        if _process not in (None, os.getpid()):
            raise RuntimeError("object storage was used before a fork: the child would hang")
        _process = os.getpid()
        if key not in _clients:
            check_address(str(address))
            from obstore.store import from_url

            options = _client_options(_is_http_allowed(place))
            retries = _retries_within(seconds)
            _clients[key] = send(
                place, lambda: from_url(place, client_options=options, retry_config=retries)
            )
        return _clients[key]


def list_objects(address: Address) -> dict[str, Object]:
    """Return the objects in a folder and its subfolders, by their addresses."""
    root = str(address)
    place = str(address._replace(key=""))
    client = client_of(address, START_SECONDS)
    import obstore

    objects: dict[str, Object] = {}

    def read_pages() -> None:
        objects.clear()
        for page in obstore.list(client, prefix=address.key or None, chunk_size=1000):
            for meta in page:
                path = f"{place}/{meta['path']}"
                # some programs write an empty object of the folder's name
                if path != root:
                    objects[path] = _object(meta)

    send(root, read_pages)
    return objects


def subfolders(address: Address) -> list[str]:
    """Return the names of the subfolders of a folder."""
    client = client_of(address, START_SECONDS)
    import obstore

    result = send(str(address), lambda: obstore.list_with_delimiter(client, address.key or None))
    return [prefix.rpartition("/")[2] for prefix in result["common_prefixes"]]


def head(address: Address, seconds: float | None = None) -> Object | None:
    """Return the object of an address; None if there is none. For `seconds` see `client_of`."""
    client = client_of(address, seconds)
    import obstore

    try:
        return _object(send(str(address), lambda: obstore.head(client, address.key)))
    except FileNotFoundError:
        return None


def read(address: Address, e_tag: str | None) -> bytes:
    """Return the content of an object.

    Raises:
        FileNotFoundError: There is no such object.
        StorageError: The storage cannot be reached, or the object has another ETag.
    """
    client = client_of(address)
    import obstore

    options = _options(e_tag)
    return send(
        str(address), lambda: bytes(obstore.get(client, address.key, options=options).bytes())
    )


def read_range(address: Address, e_tag: str | None, start: int, num_bytes: int) -> bytes:
    """Return a range of an object, which is not empty. For errors see `read`."""
    client = client_of(address)
    import obstore

    options: Any = {**(_options(e_tag) or {}), "range": (start, start + num_bytes)}
    return send(
        str(address), lambda: bytes(obstore.get(client, address.key, options=options).bytes())
    )


def download(address: Address, e_tag: str | None, target: Path) -> None:
    """Write the content of an object to a file, with the time of its last change if its metadata have it.

    Raises:
        FileNotFoundError: There is no such object.
        StorageError: The storage cannot be reached, or the object has another ETag.
    """
    client = client_of(address)
    import obstore

    options = _options(e_tag)

    def write() -> str | None:
        result = obstore.get(client, address.key, options=options)
        with open(target, "wb") as file:
            for chunk in result.stream():
                file.write(chunk)
        return result.attributes.get(CHANGED)

    changed = send(str(address), write)
    if changed is not None and changed.isdecimal():
        os.utime(target, ns=(int(changed), int(changed)))


def _options(e_tag: str | None) -> Any:
    """Return the options of a request for an object: it fails if the object was replaced."""
    return None if e_tag is None else {"if_match": e_tag}


def _object(meta: Mapping[str, Any]) -> Object:
    """Return an object from its description by obstore."""
    seconds = int(meta["last_modified"].timestamp())  # some requests have no fractions of a second
    changed = min(seconds * 10**9, _LATEST)
    return Object(meta["size"], changed, meta["e_tag"])


def send(path: str, request: Callable[[], _Result]) -> _Result:
    """Return the result of a request, with errors in plain words.

    Args:
        path: What is requested, for messages: an address.
        request: Calls obstore.

    Raises:
        FileNotFoundError: There is no such object.
        StorageError: The storage cannot be reached or refuses access, or the object was replaced.
    """
    from obstore import exceptions

    try:
        return _interruptible(lambda: _repeated(request))
    except FileNotFoundError as error:
        if _is_bucket_missing(str(error)):
            raise StorageError(_bucket_missing(path)) from None
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    except exceptions.PreconditionError:
        message = f"{path} was replaced after its folder was listed (its ETag has changed)"
        raise StorageError(f"{message}: start again when nothing changes it") from None
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
    from obstore import exceptions

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


def _interruptible(request: Callable[[], _Result]) -> _Result:
    """Return the result of a request. In the main thread, Ctrl-C and other signals end the wait for it.

    While obstore waits for an answer, Python handles no signal, and requests are repeated for minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    return start_in_thread(request, "request").result()


def _client_options(is_http_allowed: bool) -> Any:
    """Return the options of a client of obstore."""
    options: Any = {
        "timeout": timedelta(seconds=_ANSWER_SECONDS),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
    }
    if is_http_allowed:
        options["allow_http"] = True
    return options


def _retries_within(seconds: float) -> Any:
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


def endpoint_of(scheme: str) -> str:
    """Return the endpoint that the environment sets for a scheme; "" for that of its cloud."""
    variable = _endpoint_variable(scheme)
    return "" if variable is None else os.environ[variable]


def _endpoint_variable(scheme: str) -> str | None:
    return next((name for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)


def _is_http_allowed(place: str) -> bool:
    """Return whether an endpoint without encryption is used: on this machine, or where the user allows it.

    Raises:
        StorageError: The endpoint is not encrypted, on another machine, and not allowed.
    """
    scheme = parse_address(place).scheme
    variable = _endpoint_variable(scheme)
    if variable is None:
        return False
    endpoint = urlsplit(os.environ[variable])
    if endpoint.username or endpoint.password:
        raise StorageError(
            f"{variable} has a user name or password: remove it, and set {_CREDENTIALS[scheme]} instead"
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
    from obstore import exceptions

    text = str(error).partition("\n\nDebug source:")[0]
    if _is_bucket_missing(text):
        return _bucket_missing(path)
    # before the search for words below, which the name may contain
    if isinstance(error, exceptions.InvalidPathError):
        return _invalid_name(path, text)
    scheme = parse_address(path).scheme
    credentials = _CREDENTIALS[scheme]
    code = re.search(r"<Code>([\w.]{1,50})</Code>", text)
    if code and code[1] == "InvalidObjectState":
        return f"{path} is in an archive class of the storage, such as Glacier: restore it first"
    # without credentials, obstore requests those of a virtual machine in a cloud, from 169.254.169.254
    key = re.escape(parse_address(path).key)
    words = _without_urls(re.sub(rf'(location |path |"){key}(?=[":\s])', r"\1", text))
    is_lacking = "169.254." in text or re.search(
        "[Mm]etadata|Missing|must be specified|[Cc]redential", words
    )
    if is_lacking:
        return f"{path}: no credentials: set {credentials}"
    is_refused = isinstance(
        error, (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    )
    if is_refused or re.search(r"status code: 40[13]\b|AccessDenied|InvalidAccessKeyId", text):
        reason = f" ({code[1]})" if code else ""
        return f"{path}: access denied{reason}: check {credentials}, and the permissions there"
    reason = _without_urls(text.partition(" - ")[2].partition("<")[0] or text).rstrip(": ")
    return f"{path}: the storage does not answer, or not as expected ({reason}): check the address and the network"


def _invalid_name(path: str, text: str) -> str:
    """Return a message about an object whose name obstore refuses, from the text of its error."""
    match = re.search(r'Path "(.*)"(?: contained|: Encountered)', text, re.DOTALL)
    if match is None:
        return f"{path}: a name of an object is unsupported: {_without_urls(text)}"
    name = shown(match[1])
    return f"{path}: an object has the name {name!r}: {_UNSUPPORTED_NAME}. Rename or delete it"


def _without_urls(text: str) -> str:
    return " ".join(re.sub(r"\w+://\S+", "", text).split())
