"""What a client may send: the size of bodies, and the names in the Host header."""

import asyncio
import contextlib
import ipaddress

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.serving.errors import busy, error_response, quoted

_BODIES_HELD = 16  # of the largest size that fit into the memory for all requests
_MAX_DRAINED_BYTES = 2**26
_TOO_SLOW = 408
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Middleware that limits requests, and adds headers to all responses.

    A body is counted while it arrives, whatever its headers say. If a request is refused before all of its body has
    arrived, the rest is read and discarded first: a client that is sending would not see the response.

    Args:
        app: The application behind the guard.
        max_bytes: Bytes of a body.
        seconds: Time in which a refused request may send the rest of its body.
        is_local: Whether only loopback names are accepted in the Host header. This prevents DNS rebinding: a web page
            could point its own name at 127.0.0.1 and read the responses.

    Attributes:
        num_bytes: Bytes of all bodies in memory.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, is_local: bool) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.is_local = is_local
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        num_bytes = 0
        has_arrived = False

        async def receive_limited() -> Message:
            nonlocal num_bytes, has_arrived
            message = await receive()
            has_arrived = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            self.num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise HTTPException(
                    413, f"the body of a request has at most {self.max_bytes:,} bytes"
                )
            if self.num_bytes > _BODIES_HELD * self.max_bytes:
                raise busy(429, "too many large requests are being sent")
            return message

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not has_arrived and message["status"] != _TOO_SLOW:
                    await _drain(receive, self.seconds)
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if self.is_local and not is_loopback(_host_name(host)):
            response = error_response(
                403, f"this server answers to localhost, not to {quoted(_host_name(host))}"
            )
            return await response(scope, receive, send_last)
        try:
            await self.app(scope, receive_limited, send_last)
        finally:
            self.num_bytes -= num_bytes


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


async def _drain(receive: Receive, seconds: float) -> None:
    """Read and discard the rest of a request's body, for at most `seconds`."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while num_bytes < _MAX_DRAINED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):  # or the client has left
                    return
