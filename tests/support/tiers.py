"""Which rows of a parametrized test run in `make test`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(rows: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Mark the rows of a parametrisation as slow, all but the quick ones."""
    kept = set(quick)
    return [row if row in kept else _slow(row) for row in rows]


def _slow(row: Any) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.slow)
