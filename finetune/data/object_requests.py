"""Requests to object storage by obstore: the options of its clients, retries, and errors in plain words."""

import errno
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from obstore import exceptions
from obstore.store import from_url

from finetune.data.addresses import SCHEMES, StorageError, parse_address
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

_UNSUPPORTED_NAME = (
    "names with empty parts (//), '.' or '..' as a part, or control characters are unsupported"
)

_Result = TypeVar("_Result")


def new_client(place: str, seconds: float) -> Any:
    """Return a client of a bucket, with credentials and endpoint from the environment.

    Args:
        place: The bucket, as an address.
        seconds: How long it repeats a failed request.

    Raises:
        StorageError: The endpoint is not encrypted, on another machine, and not allowed.
    """
    options = client_options(_is_http_allowed(place))
    return from_url(place, client_options=options, retry_config=retries_within(seconds))


def send(path: str, request: Callable[[], _Result]) -> _Result:
    """Return the result of a request, with errors in plain words.

    Args:
        path: What is requested, for messages: an address.
        request: Calls obstore.

    Raises:
        FileNotFoundError: There is no such object.
        StorageError: The storage cannot be reached or refuses access, or the object was replaced.
    """
    try:
        return interruptible(lambda: _repeated(request))
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
    words = _without_urls(text.replace(parse_address(path).key, ""))
    is_lacking = "169.254." in text or re.search(
        "[Mm]etadata|Missing|must be specified|[Cc]redential", words
    )
    if scheme in SCHEMES and is_lacking:
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
