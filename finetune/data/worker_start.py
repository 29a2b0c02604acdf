"""The start of DataLoader workers, during which signals are still handled."""

import multiprocessing
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from finetune.distributed.signals import stop_if_asked

_WHERE = "in DataLoader worker"
_HINT = "more shared memory (/dev/shm, ulimit -f), a smaller --batch, or --workers 0 helps"
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def is_forking(context: BaseContext | None) -> bool:
    """Return whether workers are started by fork: on Linux, unless the user has set another start method."""
    if sys.platform != "linux":
        return False
    if context is not None:
        return isinstance(context, ForkContext)
    # Python 3.14's default is a fork server, which would run an unguarded script once more.
    return multiprocessing.get_start_method() in ("fork", "forkserver")


class ResultQueue(Queue):
    """A queue of the batches of workers, by which a batch that cannot be sent is an error in the main process.

    Python's own queue drops the batch, and the main process would wait for it forever. A worker sends batches through
    shared memory, which may be full or limited.
    """

    def _on_queue_feeder_error(self, error: BaseException, item: Any) -> None:
        is_worker = multiprocessing.parent_process() is not None
        if not is_worker or not isinstance(item, tuple):
            super()._on_queue_feeder_error(error, item)  # type: ignore[misc]
            return
        number = item[0]  # of the batch
        reason = f"a batch cannot be sent to the main process: {' '.join(str(error).split())}"
        described = RuntimeError(f"{reason}; {_HINT}")
        with suppress(ValueError):  # the queue is closed, since the worker ends
            self.put((number, ExceptionWrapper((RuntimeError, described, None), _WHERE)))


class Forks(ForkContext):
    """Forks workers. Before each fork the main process handles its pending signals.

    Args:
        mask: The signals that were blocked before the first fork.
    """

    def __init__(self, mask: set[Any]) -> None:
        self._mask = mask

    def Queue(self, maxsize: int = 0) -> Queue:
        return ResultQueue(maxsize, ctx=self.get_context())

    def Process(self, **options: Any) -> ForkProcess:  # type: ignore[override]  # a class in other contexts
        # unblocking runs the handlers of pending signals
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        stop_if_asked()
        return ForkProcess(**options)


class Workers(_MultiProcessingDataLoaderIter):
    """The workers of a `Loader`. If a signal interrupts their start, the workers that already run are ended."""

    def __init__(self, loader: DataLoader) -> None:
        # torch only sets this once all workers have started, but `_shutdown_workers` reads it.
        self._workers_status: Any = defaultdict(lambda: True)
        try:
            super().__init__(loader)
        except BaseException:
            if hasattr(self, "_workers"):
                self._shutdown_workers()
            raise
