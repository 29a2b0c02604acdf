"""Daemon threads: they do not delay the end of the process, as a request that is repeated for minutes would."""

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class DaemonThreads:
    """Threads that call functions, started by the first call in a process.

    Args:
        num: Their number.
        name: The start of their names.
    """

    def __init__(self, num: int, name: str) -> None:
        self._num = num
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._process: int | None = None  # a forked child has no threads

    def submit(self, task: Callable[[], _Result]) -> Future[_Result]:
        """Return the result or exception of a function as a future."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._tasks = queue.SimpleQueue()
            for i in range(self._num):
                Thread(target=self._work, name=f"{self._name}-{i}", daemon=True).start()
        future: Future[_Result] = Future()
        self._tasks.put((future, task))
        return future

    def _work(self) -> None:
        while True:
            future, task = self._tasks.get()
            if future.set_running_or_notify_cancel():
                _complete(future, task)
            del future, task  # or they keep what they hold


def start_in_thread(task: Callable[[], _Result], name: str) -> Future[_Result]:
    """Call a function in a new daemon thread, and return its result or exception as a future.

    Args:
        task: The function.
        name: Name of the thread.
    """
    future: Future[_Result] = Future()

    def work() -> None:
        _complete(future, task)

    Thread(target=work, name=name, daemon=True).start()
    return future


def _complete(future: Future[_Result], task: Callable[[], _Result]) -> None:
    """Call a function, and set its result or exception in a future."""
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
