"""metrics.csv and steps.csv: read as they were written, and a resumed run continues them as if nothing had happened."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.runs.folder import Run
from finetune.runs.metrics_csv import MetricsCSV, is_defined, read_metrics

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=8)
# also what ends a line elsewhere
NAMES |= st.sampled_from(["val/recall/a, b", 'c "d"', "a\u2028b\x85c"])
ROWS = st.lists(
    st.dictionaries(NAMES.filter(lambda name: name != "step"), st.floats(width=32), max_size=4),
    min_size=1,
    max_size=6,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_in(tmp_path)


def run_in(folder: str | Path) -> Run:
    run = Run(folder, "fit", Path(folder))
    run.file("steps.csv").unlink(missing_ok=True)
    return run


@given(logged=ROWS, restarts=st.sets(st.integers(0, 5)))
def test_steps_csv_is_read_as_it_was_logged(logged, restarts):
    with tempfile.TemporaryDirectory() as folder:
        run = run_in(folder)
        logger = MetricsCSV(run)
        for step, row in enumerate(logged):
            if step in restarts:
                logger = MetricsCSV(run)
            logger.log_metrics(row, step)
        read = read_metrics(run.file("steps.csv"))
    columns = ["step", *dict.fromkeys(name for row in logged for name in row)]
    assert [list(row) for row in read] == [columns] * len(logged)
    for step, (row, given_row) in enumerate(zip(read, logged, strict=True)):
        expected = {name: repr(v) for name, v in given_row.items() if is_defined(name, v)}
        assert {name: value for name, value in row.items() if value} == {
            "step": str(step),
            **expected,
        }


def test_a_half_written_last_row_of_steps_csv_is_left_out(run):
    logger = MetricsCSV(run)
    for step in range(3):
        logger.log_metrics({"loss": 0.125 + step, "val": 0.75}, step)
    path = run.file("steps.csv")
    content = path.read_text()
    full = read_metrics(path)
    for length in range(len(content)):
        path.write_text(content[:length])
        complete = max(content[:length].count("\n") - 1, 0)  # lines but the header
        assert read_metrics(path) == full[:complete], content[:length]


def fit(run: Run, first: int, last: int = 20) -> Iterator[int]:
    """Log steps, four an epoch, as Lightning does, and yield each; the fourth epoch is not validated."""
    logger = MetricsCSV(run)
    logger.rewind(first)
    for step in range(first, last):
        epoch = step // 4
        logger.log_metrics({"lr-SGD/head": 0.1 * step}, step)
        logger.log_metrics({"train/loss": float(step), "epoch": epoch}, step)
        yield step
        if step % 4 == 3:
            if epoch != 3:
                logger.log_metrics({"val/accuracy": epoch / 5, "epoch": epoch}, step)
            logger.log_metrics({"train/loss_epoch": step - 1.5, "epoch": epoch}, step)
            logger.log_epoch(epoch + 1, step + 1, 0.25)


def test_metrics_csv_has_a_row_for_each_epoch(run):
    list(fit(run, 0))
    _, _, _, unvalidated, last = read_metrics(run.file("metrics.csv"))
    assert {name: float(value) for name, value in last.items()} == {
        "epoch": 5,
        "step": 20,
        "seconds": 0.25,
        "train/loss": 17.5,
        "val/accuracy": 0.8,
        "lr-SGD/head": pytest.approx(1.9),
    }
    assert unvalidated["val/accuracy"] == ""  # and not that of the epoch before


@given(killed_at=st.integers(0, 19), back=st.integers(0, 8), has_torn_row=st.booleans())
def test_the_metrics_of_a_run_that_was_killed_and_resumed(killed_at, back, has_torn_row):
    """The checkpoint is some steps older than the kill; it is never of before the last epoch's row but one."""
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as resumed:
        list(fit(run_in(alone), 0))
        run = run_in(resumed)
        for step in fit(run, 0):
            if step == killed_at:
                break
        if has_torn_row:
            with open(run.file("steps.csv"), "a") as file:
                file.write("9,0.12")
        list(fit(run, max(0, killed_at - back)))
        for name in ("steps.csv", "metrics.csv"):
            assert read_metrics(run.file(name)) == read_metrics(Path(alone, name))


def test_an_epoch_that_was_resumed_inside_has_one_row_with_all_of_it(run):
    logger = MetricsCSV(run)
    logger.log_metrics({"val/loss": 0.5, "epoch": 0}, 0)  # validated in the middle of an epoch
    logger.log_metrics({"train/loss_epoch": 3.0, "epoch": 0}, 1)
    logger.log_epoch(1, 2, 0.25)  # a limit ended the run
    resumed = MetricsCSV(run)
    resumed.rewind(2)
    resumed.log_metrics({"train/loss_epoch": 2.0, "epoch": 0}, 3)
    resumed.log_epoch(1, 4, 0.5)
    (row,) = read_metrics(run.file("metrics.csv"))
    assert [row[name] for name in ("step", "val/loss", "train/loss")] == ["4", "0.5", "2.0"]


def test_a_loss_that_is_not_a_number_is_not_hidden():
    names = "train/loss", "train/loss_epoch", "val/loss", "val/recall/loss", "val/f1", "lr-SGD/head"
    assert [is_defined(name, math.nan) for name in names] == [True, True, True, False, False, False]
    assert all(is_defined(name, 0.0) for name in names)
