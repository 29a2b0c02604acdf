"""Error responses: JSON with a message about what is wrong and what to do."""

import asyncio
import contextlib
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import Receive

from finetune.serving.response_types import Error, FailedImage

_MAX_DRAINED_BYTES = 2**26


class Refused(Exception):
    """A request is rejected.

    Args:
        status: HTTP status.
        message: One line: what is wrong, and what to do.
        images: The images that caused the error.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        images: Sequence[FailedImage] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.images = list(images)
        self.headers = headers

    def response(self) -> JSONResponse:
        content = Error(error=self.message)
        if self.images:
            content["pictures"] = self.images
        return JSONResponse(content, self.status, self.headers)


def busy(message: str, seconds: float) -> Refused:
    """Return a 429 with a Retry-After header of `seconds`."""
    return Refused(
        429, f"{message}; try again in {max(1, round(seconds))} s", headers=_after(seconds)
    )


def too_late(message: str, seconds: float) -> Refused:
    """Return a 503, for a request that took the service too long, with a Retry-After header."""
    return Refused(503, message, headers=_after(seconds))


def _after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds)))}


async def drain(receive: Receive, seconds: float) -> None:
    """Read and discard the rest of a request's body.

    If the connection were closed while the client is sending, the client would not see the response.

    Args:
        receive: The ASGI callable of the request.
        seconds: Time limit. A slower client gets its response then.
    """
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while num_bytes < _MAX_DRAINED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
