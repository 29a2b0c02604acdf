"""Authorization of requests: by a token, or without one by the Host header."""

import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.serving.refusal import Refused, drain
from finetune.system.messages import shown

_OPEN = {
    "/",
    "/openapi.json",
    "/healthz",
    "/readyz",
}  # these need no token: they reveal nothing about the model
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Middleware that rejects unauthorized requests.

    A service without a token that listens on the loopback only accepts only loopback names in the Host
    header. This prevents DNS rebinding: a web page could point its own name at 127.0.0.1 and read the
    responses.

    Args:
        app: The application behind the guard.
        token: The token that requests must send; None for no token.
        host: The host name or address that the service listens on.
        seconds: Time in which a rejected request may send the rest of its body.
    """

    def __init__(self, app: ASGIApp, token: str | None, host: str, seconds: float) -> None:
        self.app = app
        self.token = token
        self.is_local = is_loopback(host)
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        refused = self._refused(Headers(scope=scope), scope["path"])
        if refused is None:
            return await self.app(scope, receive, send_with_headers)
        await drain(receive, self.seconds)
        await refused.response()(scope, receive, send_with_headers)

    def _refused(self, headers: Headers, path: str) -> Refused | None:
        if self.token is not None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            is_authorized = (
                hmac.compare_digest(token.strip().encode(), self.token.encode())
                and scheme.lower() == "bearer"
            )
            if path in _OPEN or is_authorized:
                return None
            bearer = {"WWW-Authenticate": "Bearer"}
            return Refused(
                401,
                "a token is needed: send the header Authorization: Bearer TOKEN",
                headers=bearer,
            )
        name = host_name(headers.get("host", ""))
        if self.is_local and not is_loopback(name):
            return Refused(
                403,
                f"this service answers to localhost, not to {shown(name)!r}: --token lets others ask",
            )
        return None


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
