"""When each process of a pipeline works on which micro-batch, simulated for the drawing."""

from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    """A micro-batch, numbered from 1, going one way through one part; times in those of a forward task."""

    kind: str
    number: int
    start: int
    width: int


Order = list[tuple[str, int]]
WIDTHS = {"forward": 1, "backward": 2}


def gpipe(i: int, k: int, m: int) -> Order:
    """Return what process i of k does, in order: all m forward, all backward (arXiv:1811.06965, figure 2c)."""
    return [("forward", n) for n in range(1, m + 1)] + [("backward", n) for n in range(1, m + 1)]


def one_forward_one_backward(i: int, k: int, m: int) -> Order:
    """Return what process i of k does, in order: k - i forward, then by turns (arXiv:2006.09503, figure 2)."""
    first = min(k - i, m)
    order: Order = [("forward", n) for n in range(1, first + 1)]
    for n in range(1, m + 1):
        order.append(("backward", n))
        if first + n <= m:
            order.append(("forward", first + n))
    return order


SCHEDULES: dict[str, Callable[[int, int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def timeline(schedule: Callable[[int, int, int], Order], k: int, m: int) -> list[list[Task]]:
    """Return each process's tasks, each begun as soon as the process is free and its input is there."""
    waiting = [schedule(i, k, m) for i in range(k)]
    done: list[list[Task]] = [[] for _ in range(k)]
    ends: dict[tuple[str, int, int], int] = {}
    while any(waiting):
        for i in range(k):
            while waiting[i]:
                kind, number = waiting[i][0]
                source = (kind, number, i - 1 if kind == "forward" else i + 1)
                if kind == "backward" and i == k - 1:
                    source = ("forward", number, i)
                if not (kind == "forward" and i == 0) and source not in ends:
                    break
                free = done[i][-1].start + done[i][-1].width if done[i] else 0
                start = max(free, ends.get(source, 0))
                ends[kind, number, i] = start + WIDTHS[kind]
                done[i].append(Task(kind, number, start, WIDTHS[kind]))
                waiting[i].pop(0)
    return done


def held(tasks: list[Task]) -> int:
    """Return of how many micro-batches a process keeps activations at most: from forward to the end of backward."""
    most = now = 0
    for task in tasks:
        now += 1 if task.kind == "forward" else -1
        most = max(most, now)
    return most
