"""Daemon threads: they do not delay the end of the process, as a request that is repeated for minutes would."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

_Result = TypeVar("_Result")


def start_in_thread(task: Callable[[], _Result], name: str) -> Future[_Result]:
    """Call a function in a new daemon thread, and return its result or exception as a future.

    Args:
        task: The function.
        name: Name of the thread.
    """
    future: Future[_Result] = Future()

    def work() -> None:
        complete(future, task)

    Thread(target=work, name=name, daemon=True).start()
    return future


def complete(future: Future[_Result], task: Callable[[], _Result]) -> None:
    """Call a function, and set its result or exception in a future."""
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
