"""Checkpoints that wait in memory, where epochs end so soon that writing each would take much of a fit.

On a small set a network like ResNet-18 ends an epoch every second or two, on a GPU in a few tenths, and its
checkpoint, with momentum 90 MB, takes one or two tenths to write, synced to the disk. So the next is written once the
last has come to be a small share of the time. What waits is written at a signal, at an error where the first process
comes to it, and in the end. A kill loses it, which is that little time, and `--resume` takes it again.
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

SHARE = 0.02  # of the time, that goes into checkpoints at epochs' ends
LONGEST = 60.0  # seconds that one waits, even if they come to a larger share
QUICK = 0.05  # seconds: what is written as soon as that does not wait
# bytes of one that waits, of which there may be two, and a third while that is copied
MOST = 500_000_000


class DeferredCheckpoints:
    """What waits, by the names under which it is to be written. That is the first process's; others hold nothing."""

    def __init__(self) -> None:
        # in the order in which they are to be written
        self._waiting: dict[str, dict[str, Any]] = {}
        self._writing, self._size = 0.0, 0  # seconds and bytes of the latest
        # of all that was written for the latest last.ckpt, and since then
        self._seconds = self._since_last = 0.0
        self._ended = self._asked = -math.inf  # when a last.ckpt was written, when an epoch ended

    @contextmanager
    def timed(self, path: Path, names: Sequence[str]) -> Iterator[None]:
        """Take the time of a checkpoint that is written meanwhile, to `path` first."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self._writing, self._size = now - began, path.stat().st_size
        self._since_last += self._writing
        self._asked += self._writing  # which is no part of the next epoch
        # or what is written as the best inside epochs would let the last wait for ever
        if "last" in names:
            self._seconds = self._since_last
            self._since_last = 0.0
            self._ended = now

    def may_wait(self) -> bool:
        """Return whether what is to be written as an epoch ends would, as the last time, take more than its share.

        And whether it would not wait for too long, should the next epoch take as long as this one.
        """
        now = time.monotonic()
        epoch, self._asked = now - self._asked, now
        waited = now - self._ended
        is_soon = waited < self._seconds / SHARE and waited + epoch < LONGEST
        return is_soon and is_worth_it(self._writing, self._size)

    def hold(self, names: Sequence[str], checkpoint: dict[str, Any]) -> bool:
        """Let a copy of a checkpoint wait, in place of what has waited under these names.

        Returns:
            Whether there was memory for it. If not, what has waited does so until it is dropped.
        """
        try:
            copied = copy_of(checkpoint)
        except (
            MemoryError,
            RuntimeError,
        ):  # the latter is torch's; what else is wrong, writing it will say
            return False
        self.drop(names)
        self._waiting |= dict.fromkeys(names, copied)
        return True

    def drop(self, names: Sequence[str]) -> None:
        """Forget what waits under these names: another has been written in its place."""
        for name in names:
            self._waiting.pop(name, None)

    def take(self, but: Sequence[str] = ()) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yield each checkpoint that waits and its names, but for some, in the order in which to write them."""
        while wanted := [name for name in self._waiting if name not in but]:
            checkpoint = self._waiting[wanted[0]]
            names = [name for name in wanted if self._waiting[name] is checkpoint]
            yield names, checkpoint
            self.drop(names)


def seconds_of_each(writing: float, size: int, copying: float, epoch: float) -> float:
    """Return what checkpoints take of each epoch.

    Args:
        writing: Seconds that it takes to write one.
        size: Its bytes.
        copying: Seconds that it takes to copy one.
        epoch: Seconds of an epoch.
    """
    if not is_worth_it(writing, size):
        return writing
    # of which one is written
    num = max(1, min(math.ceil(writing / SHARE / epoch), math.ceil(LONGEST / epoch) - 1))
    return (writing + (num - 1) * copying) / num


def is_worth_it(writing: float, size: int) -> bool:
    """Return whether what takes so many seconds to write, and so many bytes, is ever to wait."""
    return writing > QUICK and size <= MOST


def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as it is now, in the memory of the CPU."""
    copies: dict[int, Any] = {}  # by the identity of what is copied, as `deepcopy` has them

    def copied(tensor: Tensor) -> None:
        copies[id(tensor)] = tensor.detach().to("cpu", copy=True)

    apply_to_collection(checkpoint, Tensor, copied)
    return copy.deepcopy(checkpoint, copies)
