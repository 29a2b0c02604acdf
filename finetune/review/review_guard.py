"""Authorization of requests to a review: by a token in the path, the Host header and the Origin header."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.serving.guard import host_name, is_loopback
from finetune.serving.refusal import Refused, drain
from finetune.system.messages import shown

_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_SECONDS_TO_DRAIN = 5.0


class ReviewGuard:
    """Middleware that rejects requests which do not come from the page.

    - The first part of the path must be the token, which only the terminal shows.
    - The Host header must name the loopback. Otherwise a web page could point its own name at 127.0.0.1.
    - A request that changes something must have the page's origin and a JSON body. Other pages cannot send both.

    Args:
        app: The application behind the guard.
        token: The token.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        refused = self._refused(scope["method"], scope["path"], Headers(scope=scope))
        if refused is None:
            return await self.app(scope, receive, send_with_headers)
        await drain(receive, _SECONDS_TO_DRAIN)
        await refused.response()(scope, receive, send_with_headers)

    def _refused(self, method: str, path: str, headers: Headers) -> Refused | None:
        host = headers.get("host", "")
        if not is_loopback(host_name(host)):
            return Refused(403, f"a review answers to localhost, not to {shown(host_name(host))!r}")
        token = path[1:].partition("/")[0]
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return Refused(
                403, "the token is missing or wrong: open the address that finetune review printed"
            )
        if method in ("GET", "HEAD"):
            return None
        if headers.get("origin") != f"http://{host}":
            return Refused(403, "the request does not come from the page of the review")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return Refused(415, "the body must be JSON: application/json")
        return None
