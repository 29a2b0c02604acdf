"""Writes checkpoints in a thread while training continues.

On a small data set, an epoch takes a second or less, and writing its checkpoint (90 MB for a ResNet-18 with momentum)
one or two tenths. If an epoch ends before the checkpoint of an earlier one is written, the newer one replaces it.
A kill loses the checkpoints that are not written yet, and `--resume` repeats their epochs.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

# Bytes of tensors in a checkpoint that is copied. There may be four copies: two names, written and waiting.
MOST = 500_000_000


class Item(NamedTuple):
    """A checkpoint to write.

    Attributes:
        content: Its content.
        record: What is to be recorded once it is written.
    """

    content: dict[str, Any]
    record: Any


ByName = Mapping[str, Item]


class BackgroundWriter:
    """Writes the newest checkpoint of each name. Checkpoints that were put together are written together.

    Args:
        write: Writes checkpoints, and records them. Two names may have the same one.
    """

    def __init__(self, write: Callable[[ByName], None]) -> None:
        self._write = write
        self._waiting: dict[str, Item] = {}
        self._lock = threading.Lock()  # of `_waiting`
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._latest: Future[None] | None = None

    def put(self, names: Sequence[str], checkpoint: dict[str, Any], record: Any = None) -> None:
        """Begin to write a checkpoint. A large one is written before this returns, without a copy in memory.

        Args:
            names: Its names.
            checkpoint: Its content, which may change afterwards.
            record: What is to be recorded once it is written.

        Raises:
            OSError: An earlier checkpoint could not be written. This one waits for `finish`.
        """
        is_large = _num_bytes(checkpoint) > MOST
        content = checkpoint if is_large else copy_of(checkpoint)
        with self._lock:
            self._waiting |= dict.fromkeys(names, Item(content, record))
        if self._latest is not None and self._latest.done():
            self._latest.result()
        self._latest = self._thread.submit(self._write_waiting)
        if is_large:
            self._latest.result()

    def finish(self) -> None:
        """Wait until all checkpoints are written. Those that could not be written are tried again.

        Raises:
            OSError: One could not be written.
        """
        self._thread.submit(self._write_waiting).result()

    def _write_waiting(self) -> None:
        with self._lock:
            taken = self._waiting
            self._waiting = {}
        if not taken:
            return
        try:
            self._write(taken)
        except BaseException:
            with self._lock:
                self._waiting = taken | self._waiting
            raise


def _num_bytes(checkpoint: dict[str, Any]) -> int:
    sizes: list[int] = []
    apply_to_collection(checkpoint, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a checkpoint with all tensors on the CPU."""
    copies: dict[int, Any] = {}  # the memo of `deepcopy`: copies by the identity of the original

    def copied(tensor: Tensor) -> None:
        copies[id(tensor)] = tensor.detach().to("cpu", copy=True)

    apply_to_collection(checkpoint, Tensor, copied)
    return copy.deepcopy(checkpoint, copies)
