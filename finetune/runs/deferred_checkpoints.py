"""Checkpoints that wait in memory if epochs are so short that writing each would take much of the fit's time.

On a small data set, an epoch of ResNet-18 takes one or two seconds, on a GPU a few tenths of a second.
Writing its checkpoint (90 MB with momentum) and syncing it to disk takes one or two tenths. So the next
checkpoint is written only once the time for the last one is a small share of the time since then.

A deferred checkpoint is written at a signal, at an error on rank 0, and at the end. A kill loses it.
`--resume` then repeats that short time.
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

SHARE = 0.02  # share of the time that is spent on checkpoints at the ends of epochs
# Seconds after which a checkpoint is written even if its share of the time is larger.
LONGEST = 60.0
QUICK = 0.05  # seconds: a checkpoint that is written faster is never deferred
# Bytes of a checkpoint that may be deferred. There may be two in memory, and a third during a copy.
MOST = 500_000_000


class DeferredCheckpoints:
    """The deferred checkpoints of rank 0, by the names under which to write them. Other ranks hold none."""

    def __init__(self) -> None:
        # In the order in which they must be written.
        self._waiting: dict[str, dict[str, Any]] = {}
        # seconds and bytes of the latest written checkpoint
        self._write_seconds = 0.0
        self._num_bytes = 0
        # Seconds of writing all checkpoints: between the latest two last.ckpt, and since the latest one.
        self._seconds_before_last = 0.0
        self._seconds_since_last = 0.0
        # Times of `time.monotonic`: the latest last.ckpt was written, the latest epoch ended.
        self._last_written = -math.inf
        self._epoch_ended = -math.inf

    @contextmanager
    def timed(self, path: Path, names: Sequence[str]) -> Iterator[None]:
        """Measure the time of writing a checkpoint within the context.

        Args:
            path: The file that is written.
            names: All names of the checkpoint.
        """
        began = time.monotonic()
        yield
        now = time.monotonic()
        self._write_seconds = now - began
        self._num_bytes = path.stat().st_size
        self._seconds_since_last += self._write_seconds
        # The time of writing is not part of the next epoch.
        self._epoch_ended += self._write_seconds
        # Only a last.ckpt restarts the wait: a best.ckpt inside each epoch would otherwise defer last.ckpt forever.
        if "last" in names:
            self._seconds_before_last = self._seconds_since_last
            self._seconds_since_last = 0.0
            self._last_written = now

    def may_wait(self) -> bool:
        """Return whether the checkpoint at the end of an epoch may be deferred. It is called once per epoch.

        It is deferred if writing would take more than its share of the time, as measured last time, and if the wait
        would not become too long with a next epoch as long as this one.
        """
        now = time.monotonic()
        epoch = now - self._epoch_ended
        self._epoch_ended = now
        waited = now - self._last_written
        is_soon = waited < self._seconds_before_last / SHARE and waited + epoch < LONGEST
        return is_soon and is_worth_deferring(self._write_seconds, self._num_bytes)

    def hold(self, names: Sequence[str], checkpoint: dict[str, Any]) -> bool:
        """Defer a copy of a checkpoint. It replaces the deferred checkpoints of the same names.

        Returns:
            Whether there was enough memory. If not, the earlier ones stay until they are dropped.
        """
        try:
            copied = copy_of(checkpoint)
        except (MemoryError, RuntimeError):  # torch raises the latter, also for other reasons
            return False
        self.drop(names)
        self._waiting |= dict.fromkeys(names, copied)
        return True

    def drop(self, names: Sequence[str]) -> None:
        """Forget the deferred checkpoints of these names, which newer ones on disk have replaced."""
        for name in names:
            self._waiting.pop(name, None)

    def take(self, but: Sequence[str] = ()) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yield the names and content of each deferred checkpoint, in the order in which to write them.

        Each is dropped once it is written.

        Args:
            but: Names to skip.
        """
        while wanted := [name for name in self._waiting if name not in but]:
            checkpoint = self._waiting[wanted[0]]
            names = [name for name in wanted if self._waiting[name] is checkpoint]
            yield names, checkpoint
            self.drop(names)


def seconds_of_each(writing: float, size: int, copying: float, epoch: float) -> float:
    """Return the mean seconds per epoch that checkpoints take.

    Args:
        writing: Seconds to write a checkpoint.
        size: Bytes of a checkpoint.
        copying: Seconds to copy a checkpoint in memory.
        epoch: Seconds of an epoch.
    """
    if not is_worth_deferring(writing, size):
        return writing
    # One of `num` checkpoints is written, the others are copied.
    num = max(1, min(math.ceil(writing / SHARE / epoch), math.ceil(LONGEST / epoch) - 1))
    return (writing + (num - 1) * copying) / num


def is_worth_deferring(writing: float, size: int) -> bool:
    """Return whether it is worthwhile to defer checkpoints of this many seconds to write and this many bytes."""
    return writing > QUICK and size <= MOST


def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a checkpoint with all tensors on the CPU."""
    copies: dict[int, Any] = {}  # the memo of `deepcopy`: copies by the identity of the original

    def copied(tensor: Tensor) -> None:
        copies[id(tensor)] = tensor.detach().to("cpu", copy=True)

    apply_to_collection(checkpoint, Tensor, copied)
    return copy.deepcopy(checkpoint, copies)
