"""A metric that is updated on several devices and merged."""

from collections.abc import Callable, Iterable
from typing import Any

from torchmetrics import Metric


def put_together(make: Callable[[], Metric], parts: Iterable[tuple]) -> Any:
    """Sum the states of the devices' parts, as torchmetrics does after gathering, and return the metric of the sum."""
    full = make()
    for part in parts:
        metric = make()
        if len(part[0]):
            metric.update(*part)
        for name in metric._defaults:
            setattr(full, name, getattr(full, name) + getattr(metric, name))
    full._update_count = 1
    return full.compute()
