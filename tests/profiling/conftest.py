"""A clock that tests set."""

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves `time.perf_counter` by this many seconds, which nothing else does."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move
