"""Runs that are measured one by one until none is left or the time is up, and that go on where they were stopped."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.common.records import load, save

Run = TypeVar("Run")


def measure_all(
    path: Path,
    choose: Callable[[list[dict]], Run | None],
    measure: Callable[[Run], dict],
    minutes: float,
) -> bool:
    """Add the record of one run after the other to a file; return whether one of them failed.

    Args:
        path: File of records.
        choose: Returns the next run, given all records so far; None ends it.
        measure: Returns the record of a run, with `failed` where it did.
        minutes: None is started after this time.
    """
    has_failed, deadline = False, time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        run = choose(load(path))
        if run is None:
            break
        record = measure(run)
        save(path, [*load(path), record])  # another process may have added some meanwhile
        has_failed |= "failed" in record
        print(json.dumps(record), flush=True)
    return has_failed


def forget_failed(path: Path, is_chosen: Callable[[dict], bool]) -> None:
    """Take the failed runs among the chosen ones off the records, so that they are done again."""
    save(path, [r for r in load(path) if "failed" not in r or not is_chosen(r)])
