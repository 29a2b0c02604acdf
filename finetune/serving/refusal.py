"""What a request is told when it gets no answer: JSON in a form of its own, which says what to do."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive

_DRAINED = 2**26  # bytes, of a body that nobody wants, that are taken so that its sender reads why


class Refused(Exception):
    """A request that gets no answer.

    Args:
        status: The HTTP status.
        message: One line: what is wrong, and what to do.
        pictures: Which pictures are at fault: `index` in the request, `name`, `error`.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        pictures: Sequence[dict[str, Any]] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.pictures = list(pictures)
        self.headers = headers

    def response(self) -> JSONResponse:
        content: dict[str, Any] = {"error": self.message}
        if self.pictures:
            content["pictures"] = self.pictures
        return JSONResponse(content, self.status, self.headers)


def busy(message: str, seconds: float) -> Refused:
    """Return a refusal for now: who comes back after so many seconds has a chance."""
    return Refused(
        429, f"{message}; try again in {max(1, round(seconds))} s", headers=_after(seconds)
    )


def too_late(message: str, seconds: float) -> Refused:
    """Return a refusal of what took too long here."""
    return Refused(503, message, headers=_after(seconds))


def _after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds)))}


async def drain(receive: Receive, seconds: float) -> None:
    """Take the rest of a request's body: a sender whose connection is closed on it would not see the response.

    Args:
        receive: Of the request.
        seconds: That it may take; who sends slowly is answered then.
    """
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while num_bytes < _DRAINED:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
