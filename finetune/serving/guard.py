"""Authorization of requests: by a token, or without one by the Host header."""

import hmac
import ipaddress
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.serving.refusal import Refused, drain
from finetune.system.messages import shown

MAX_HEADER_BYTES = 2**14  # of a request: its address, and the names and values of its headers
# These paths need no token: they reveal nothing about the model.
OPEN_PATHS = {"/", "/openapi.json", "/healthz", "/readyz"}
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
Check = Callable[[str, str, Headers], Refused | None]


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Middleware that refuses requests, and adds headers to all responses.

    Args:
        app: The application behind the guard.
        check: Returns why a request is refused, by its method, path and headers; None if it is not.
        seconds: Time in which a refused request may send the rest of its body.
    """

    def __init__(self, app: ASGIApp, check: Check, seconds: float) -> None:
        self.app = app
        self.check = check
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        if _header_bytes(scope) > MAX_HEADER_BYTES:
            refused: Refused | None = _headers_too_large()
        else:
            refused = self.check(scope["method"], scope["path"], Headers(scope=scope))
        if refused is None:
            return await self.app(scope, receive, send_with_headers)
        await drain(receive, self.seconds)
        await refused.response()(scope, receive, send_with_headers)


def _header_bytes(scope: Scope) -> int:
    """Return the size of a request's address and headers, without separators."""
    address = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return address + sum(len(name) + len(value) for name, value in scope["headers"])


def _headers_too_large() -> Refused:
    return Refused(
        431, f"the address and the headers of a request have more than {MAX_HEADER_BYTES:,} bytes"
    )


def service_check(token: str | None, host: str) -> Check:
    """Return the check of a service.

    A service without a token that listens on the loopback only accepts only loopback names in the Host
    header. This prevents DNS rebinding: a web page could point its own name at 127.0.0.1 and read the
    responses.

    Args:
        token: The token that requests must send; None for no token.
        host: The host name or address that the service listens on.
    """
    is_local = is_loopback(host)

    def check(method: str, path: str, headers: Headers) -> Refused | None:
        if token is not None:
            is_authorized = path in OPEN_PATHS or _has_token(headers, token)
            return None if is_authorized else _token_needed()
        name = host_name(headers.get("host", ""))
        if is_local and not is_loopback(name):
            return Refused(
                403,
                f"this service answers to localhost, not to {shown(name)!r}: --token lets others ask",
            )
        return None

    return check


def _has_token(headers: Headers, token: str) -> bool:
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    is_equal = hmac.compare_digest(sent.strip().encode(), token.encode())
    return is_equal and scheme.lower() == "bearer"


def _token_needed() -> Refused:
    return Refused(
        401,
        "a token is needed: send the header Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": "Bearer"},
    )


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
