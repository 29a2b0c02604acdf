"""A fit of many epochs keeps its memory, its file handles and its workers."""

import json
from pathlib import Path
from statistics import median

import pytest
from processes import launch

# In each epoch. The allocator adds some megabytes in the first epochs. They count for 12 epochs in the short part, and
# for 80 in the long one.
MOST_BYTES = 1_000_000
MOST_BYTES_OF_MANY = 300_000


def growth(out: Path) -> dict[str, float]:
    """Return how much of each has been added in an epoch, from the first to the last fifth of its second half."""
    rows = json.loads((out / "rows.json").read_text())
    half = rows[len(rows) // 2 :]
    num = max(1, len(half) // 5)
    num_epochs = len(half) - num
    return {
        name: (median(row[name] for row in half[-num:]) - median(row[name] for row in half[:num]))
        / num_epochs
        for name in rows[0]
    }


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_and_handles_of_many_epochs_are_flat(
    colours, tmp_path, trials, record_row, num_workers
):
    num_epochs = trials(30, 200)
    out = launch("growth.py", tmp_path / "out", 1, colours, str(num_epochs), str(num_workers))
    added = growth(out)
    outcome = f"{added['bytes'] / 1e3:+.0f} kB and {added['handles']:+.2f} handles an epoch"
    record_row(f"epochs of a fit with {num_workers} workers", num_epochs, outcome)
    assert added["handles"] == 0 and added["processes"] == 0
    assert added["bytes"] < trials(MOST_BYTES, MOST_BYTES_OF_MANY)


def test_control_a_leak_is_seen(colours, tmp_path):
    out = launch("growth.py", tmp_path / "out", 1, colours, "20", "0", "leak")
    added = growth(out)
    assert added["handles"] == 1
    assert added["bytes"] > MOST_BYTES
