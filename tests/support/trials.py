"""The number of trials, and the table of results that `make chaos` prints."""

import os
from collections.abc import Callable

import pytest

_ROWS: list[tuple[str, int, str]] = []


@pytest.fixture
def trials() -> Callable[[int, int], int]:
    """Choose between the number of trials of `make test` and that of `make chaos`."""

    def choose(quick: int, full: int) -> int:
        return full if os.environ.get("FINETUNE_CHAOS") == "full" else quick

    return choose


@pytest.fixture
def record_row() -> Callable[[str, int, str], None]:
    """Add a row to the table: what was tried, how often, and the outcome."""
    return lambda what, number, outcome: _ROWS.append((what, number, outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ROWS and os.environ.get("FINETUNE_CHAOS") == "full":
        terminalreporter.section("tried, number, outcome")
        for what, number, outcome in _ROWS:
            terminalreporter.write_line(f"{what:45} {number:7,}  {outcome}")
