"""A log of requests: one JSON object per line on stdout."""

import hashlib
import json
import os
import re
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.system.terminal import redirect_closed_outputs

# An ID of this form, as proxies send it, is taken over. Other characters could forge lines in the log.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_LEFT = 499  # as nginx logs it: the client closed the connection before there was a response
_MAX_PATH = 200  # characters


def file_fingerprint(path: str | Path) -> str:
    """Return the first 16 digits of the SHA-256 of a file, as `sha256sum` prints them."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _write(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())
    except OSError:  # it is closed, or its disk is full
        redirect_closed_outputs()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class AccessLog:
    """Middleware that logs each request when it ends, and sends its ID in the header X-Request-ID.

    A line has `time` (UTC, when the request arrived), `request_id` (that of the request's header X-Request-ID, if it is
    one, else a random one), `method`, `path` without the query, `status`, `milliseconds` and `model`.

    Args:
        app: The application behind it.
        model: Fingerprint of the checkpoint that answers.
    """

    def __init__(self, app: ASGIApp, model: str) -> None:
        self.app = app
        self.model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrived = _now()
        began = time.perf_counter()
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        status = _CLIENT_LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:  # the middleware before this one answers it
            status = 500
            raise
        finally:
            line = {
                "time": arrived,
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"][:_MAX_PATH],
                "status": status,
                "milliseconds": round(1000 * (time.perf_counter() - began), 1),
                "model": self.model,
            }
            _write(json.dumps(line))
