"""Who may ask: by a token, or else only from this machine under its own name."""

import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.serving.refusal import Refused, drain
from finetune.system.messages import shown

_OPEN = {"/", "/openapi.json", "/healthz", "/readyz"}  # which say nothing of the model
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's to itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Refuses who may not ask, before anything else looks at the request.

    Without a token, and listening on this machine alone, it answers only to this machine's names: a web page that
    points a name of its own at 127.0.0.1 would otherwise read the answers.

    Args:
        app: What answers.
        token: That requests must bear, if any.
        host: Where the service listens.
        seconds: In which a refused request may bring the rest of its body.
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
            kind, _, given = headers.get("authorization", "").partition(" ")
            is_known = (
                hmac.compare_digest(given.strip().encode(), self.token.encode())
                and kind.lower() == "bearer"
            )
            if path in _OPEN or is_known:
                return None
            bearer = {"WWW-Authenticate": "Bearer"}
            return Refused(
                401,
                "a token is needed: send the header Authorization: Bearer TOKEN",
                headers=bearer,
            )
        name = _name_of(headers.get("host", ""))
        if self.is_local and not is_loopback(name):
            return Refused(
                403,
                f"this service answers to localhost, not to {shown(name)!r}: --token lets others ask",
            )
        return None


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
