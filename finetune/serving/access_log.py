"""A log of requests: one JSON object per line on stdout."""

import hashlib
import json
import os
import queue
import re
import threading
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
_MAX_WAITING_LINES = 10_000  # about 3 MB
_SECONDS_TO_END = 2.0


def file_fingerprint(path: str | Path) -> str:
    """Return the first 16 digits of the SHA-256 of a file, as `sha256sum` prints them."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class LineWriter:
    """Writes lines in a thread, so that a reader that pauses does not stop the service.

    Lines that find the queue full are lost. A line with their number, `lost_lines`, follows in their place.

    Args:
        descriptor: Where they are written; by default stdout. `sys.stdout` is not used: at exit Python would wait for
            the thread that writes to it.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._queue: queue.Queue[str | None] = queue.Queue(_MAX_WAITING_LINES)
        self._num_lost = 0
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Write a line, later and without waiting. All calls come from one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(f"{self._lost_line()}{line}\n")
            self._num_lost = 0
        except queue.Full:
            self._num_lost += 1

    def _lost_line(self) -> str:
        """Return the line with the number of lines that are lost; "" for none."""
        if not self._num_lost:
            return ""
        return json.dumps({"time": _now(), "lost_lines": self._num_lost}) + "\n"

    def close(self) -> None:
        """Write the waiting lines, for a short time if nobody reads them."""
        if self._thread is None:
            return
        try:
            self._queue.put(self._lost_line(), timeout=_SECONDS_TO_END)
            self._queue.put(None, timeout=_SECONDS_TO_END)
        except queue.Full:
            return
        self._thread.join(_SECONDS_TO_END)

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            self._write_now(text.encode())

    def _write_now(self, content: bytes) -> None:
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
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
        self.lines = LineWriter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            try:
                return await self.app(scope, receive, send)
            finally:  # the lifespan of the service has ended
                self.lines.close()
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
            self.lines.write(json.dumps(line))
