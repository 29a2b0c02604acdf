"""Requests that name the whole address, `GET http://host/path`, as proxies are asked: servers must take them, too."""

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE = re.compile(rb"https?://(?:[^/@]*@)?([^/@]+)(/.*)?", re.IGNORECASE | re.DOTALL)


class AbsoluteTarget:
    """Gives such a request the form of all others: the path alone, and the host that it names in the Host header.

    The target's host counts, whatever the header says (RFC 9112, section 3.2.2): so `Guard` sees who is really asked.

    Args:
        app: What answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (target := _ABSOLUTE.fullmatch(scope["raw_path"])):
            raw_path = target[2] or b"/"
            headers = [
                (b"host", target[1]),
                *(pair for pair in scope["headers"] if pair[0] != b"host"),
            ]
            scope = {
                **scope,
                "raw_path": raw_path,
                "path": unquote(raw_path.decode("ascii")),
                "headers": headers,
            }
        await self.app(scope, receive, send)
