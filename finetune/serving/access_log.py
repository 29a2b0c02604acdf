"""A record of requests: counts for Prometheus, and a log of one JSON object per line on stdout."""

import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.serving.errors import CLIENT_LEFT
from finetune.system.terminal import write_line

# An ID of this form, as proxies send it, is taken over. Other characters could forge lines in the log.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_PATH = 200  # characters
# upper bounds of the buckets, in seconds and in images
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServiceMetrics:
    """The counts of one service, in a separate registry.

    Args:
        class_names: The classes that may be predicted.
        waiting: Returns the number of accepted images without a response yet.
    """

    def __init__(self, class_names: Sequence[str], waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "finetune_requests",
            "Requests to /predict, by the status of their answer.",
            ["status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "finetune_request_seconds",
            "Seconds from the headers of a good request to its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.predicted = Counter(
            "finetune_images", "Images by predicted class.", ["label"], registry=self.registry
        )
        self.batches = Histogram(
            "finetune_batch_size", "Images per batch.", buckets=_SIZES, registry=self.registry
        )
        num_waiting = Gauge(
            "finetune_waiting_images",
            "Accepted images without an answer yet.",
            registry=self.registry,
        )
        num_waiting.set_function(waiting)
        # A counter must start at zero, or Prometheus computes no rate from its first count.
        for name in class_names:
            self.predicted.labels(name)


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
                self.metrics.requests.labels(str(status)).inc()
                if status == 200:
                    self.metrics.seconds.observe(seconds)
            if self.model is not None:
                line = {
                    "time": arrived,
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"][:_MAX_PATH],
                    "status": status,
                    "milliseconds": round(1000 * seconds, 1),
                    "model": self.model,
                }
                write_line(json.dumps(line), descriptor=1)
