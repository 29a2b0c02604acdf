"""The counts of a service for Prometheus."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

# Upper bounds of the buckets, in seconds.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class ServiceMetrics:
    """The counts of one service, in a separate registry.

    Args:
        class_names: The classes that may be predicted.
        waiting: Returns the number of accepted images without a response yet.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, class_names: Sequence[str], waiting: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "finetune_requests",
            "Requests to /predict, by the status of their answer.",
            ["status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "finetune_request_seconds",
            "Seconds from the headers of a good request to its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._predicted = Counter(
            "finetune_pictures", "Images by predicted class.", ["label"], registry=registry
        )
        self._batches = Histogram(
            "finetune_batch_size",
            "Images per batch.",
            buckets=[2**i for i in range(8)],
            registry=registry,
        )
        gauge = Gauge(
            "finetune_waiting_pictures",
            "Accepted images without an answer yet.",
            registry=registry,
        )
        gauge.set_function(waiting)
        # A counter must start at zero, or Prometheus computes no rate from its first count.
        for name in class_names:
            self._predicted.labels(name)

    def count_request(self, status: int, seconds: float) -> None:
        """Count a request to /predict."""
        self._requests.labels(str(status)).inc()
        if status == 200:
            self._seconds.observe(seconds)

    def count_predictions(self, labels: Sequence[str]) -> None:
        """Count the images of a request by their predicted classes."""
        for label in labels:
            self._predicted.labels(label).inc()

    def count_batch(self, size: int) -> None:
        """Count a batch."""
        self._batches.observe(size)

    def text(self) -> bytes:
        """Return all counts in Prometheus' text format."""
        return generate_latest(self._registry)
