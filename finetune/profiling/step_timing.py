"""Clocks that wait for the device, and a limit of threads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def torch_threads(num: int) -> Iterator[None]:
    """Let torch compute with this many threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clocked(action: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result of an action, and the seconds until the device has finished it."""
    synchronize(device)
    began = time.perf_counter()
    result = action()
    synchronize(device)
    return result, time.perf_counter() - began


def timed(action: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls, after a warm-up call."""
    return [clocked(action, device)[1] for _ in range(repeats + 1)][1:]
