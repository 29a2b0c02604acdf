"""A record of requests: counts for Prometheus, and a log of one JSON object per line on stdout."""

import hashlib
import json
import os
import re
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.serving.errors import CLIENT_LEFT
from finetune.serving.service_metrics import ServiceMetrics
from finetune.system.terminal import redirect_closed_outputs

# An ID of this form, as proxies send it, is taken over. Other characters could forge lines in the log.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_PATH = 200  # characters


def file_fingerprint(path: str | Path) -> str:
    """Return the first 16 digits of the SHA-256 of a file, as `sha256sum` prints them."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class AccessLog:
    """Middleware that counts requests to /predict and logs all requests when they end.

    A line has `time` (UTC, when the request arrived), `request_id` (that of the request's header X-Request-ID, if it is
    one, else a random one), `method`, `path` without the query, `status`, `milliseconds` and `model`. The response has
    the ID in the header X-Request-ID.

    Args:
        app: The application behind it.
        metrics: The counts.
        model: Fingerprint of the checkpoint that answers; None to log nothing.
    """

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics, model: str | None) -> None:
        self.app = app
        self.metrics = metrics
        self.model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrived = datetime.now(UTC).isoformat(timespec="milliseconds")
        began = time.perf_counter()
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        status = CLIENT_LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.model is not None:
                    id_header = (b"x-request-id", request_id.encode())
                    message["headers"] = [*message["headers"], id_header]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:  # the middleware before this one answers it
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - began
            if scope["path"] == "/predict":
                self.metrics.count_request(status, seconds)
            if self.model is not None:
                _write(
                    {
                        "time": arrived,
                        "request_id": request_id,
                        "method": scope["method"],
                        "path": scope["path"][:_MAX_PATH],
                        "status": status,
                        "milliseconds": round(1000 * seconds, 1),
                        "model": self.model,
                    }
                )


def _write(line: dict[str, Any]) -> None:
    try:
        os.write(1, f"{json.dumps(line)}\n".encode())
    except OSError:  # it is closed, or its disk is full
        redirect_closed_outputs()
