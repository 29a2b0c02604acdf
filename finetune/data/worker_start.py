"""Starting the processes that read images, so that a signal is handled while they start."""

import multiprocessing
import signal
import sys
from collections import defaultdict
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from finetune.distributed.signals import stop_if_asked

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def is_forking(context: BaseContext | None) -> bool:
    """Return whether workers are started by a fork: on Linux, unless the user has chosen another way."""
    if sys.platform != "linux":
        return False
    if context is not None:
        return isinstance(context, ForkContext)
    # Python 3.14 would start them by a process of its own, which runs a script without a guard once more.
    return multiprocessing.get_start_method() in ("fork", "forkserver")


class Forks(ForkContext):
    """Forks workers, and lets the main process handle its signals before each of them.

    Args:
        mask: The signals that were blocked before the first one.
    """

    def __init__(self, mask: set[Any]) -> None:
        self._mask = mask

    def Process(self, **options: Any) -> ForkProcess:  # type: ignore[override]  # a class in other contexts
        # runs the handlers of what came meanwhile
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        stop_if_asked()
        return ForkProcess(**options)


class Workers(_MultiProcessingDataLoaderIter):
    """The workers of a `Loader`; where a signal ends their start, those that run already are ended, too."""

    def __init__(self, loader: DataLoader) -> None:
        # torch sets it once all have started, and `_shutdown_workers` reads it.
        self._workers_status: Any = defaultdict(lambda: True)
        try:
            super().__init__(loader)
        except BaseException:
            if hasattr(self, "_workers"):
                self._shutdown_workers()
            raise
