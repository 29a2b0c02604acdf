"""metrics.csv goes on after a restart as if there had been none."""

import csv

import pytest

from finetune.runs.folder import Run
from finetune.runs.metrics_csv import MetricsCSV, read_metrics


def rows(run: Run) -> list[dict[str, str]]:
    with open(run.file("metrics.csv"), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_columns_are_added_as_they_appear(run):
    logger = MetricsCSV(run)
    logger.log_metrics({"train/loss": 0.5}, step=0)
    logger.log_metrics({"train/loss": 0.25}, step=1)
    logger.log_metrics({'val/precision/a, "b"': 1.0, "epoch": 0}, step=1)
    logger.log_metrics({"train/loss": 0.1, "epoch": 1}, step=2)
    columns = ["step", "train/loss", 'val/precision/a, "b"', "epoch"]
    assert [list(row) for row in rows(run)] == [columns] * 4
    assert [list(row.values()) for row in rows(run)] == [
        ["0", "0.5", "", ""],
        ["1", "0.25", "", ""],
        ["1", "", "1.0", "0"],
        ["2", "0.1", "", "1"],
    ]


def test_a_restarted_run_appends(run):
    MetricsCSV(run).log_metrics({"loss": 0.5, "lr": 0.1}, step=0)
    restarted = MetricsCSV(run)
    restarted.log_metrics({"lr": 0.2}, step=1)
    restarted.log_metrics({"loss": 0.3, "val": 1.0}, step=2)
    assert [list(row.values()) for row in rows(run)] == [
        ["0", "0.5", "0.1", ""],
        ["1", "", "0.2", ""],
        ["2", "0.3", "", "1.0"],
    ]


@pytest.mark.parametrize("killed_at", range(1, 7))
@pytest.mark.parametrize("saved_at", range(7))
def test_a_run_killed_and_resumed_has_the_metrics_of_one_left_alone(tmp_path, saved_at, killed_at):
    def log(run: Run, first: int, last: int) -> None:
        logger = MetricsCSV(run)
        logger.rewind(first)
        for step in range(first, last):
            logger.log_metrics({"train/loss": 1 / (step + 1), "lr": 0.1 * step}, step)
            if step % 3 == 2:
                logger.log_metrics({"val/accuracy": step / 10}, step)

    alone, resumed = Run(tmp_path, "fit"), Run(tmp_path, "fit")
    alone.choose(), resumed.choose()
    log(alone, 0, 7)
    log(resumed, 0, max(killed_at, saved_at))  # killed later than the checkpoint was saved
    if killed_at >= saved_at:
        with open(resumed.file("metrics.csv"), "a") as file:
            file.write("9,0.12")  # in the middle of a row
    log(resumed, saved_at, 7)
    assert read_metrics(resumed.file("metrics.csv")) == read_metrics(alone.file("metrics.csv"))


def test_a_half_written_last_row_is_left_out_wherever_it_breaks(run):
    logger = MetricsCSV(run)
    for step in range(3):
        logger.log_metrics({"loss": 0.125 + step, "val": 0.75}, step)
    path = run.file("metrics.csv")
    content, whole = path.read_text(), read_metrics(path)
    for length in range(len(content)):
        path.write_text(content[:length])
        complete = max(content[:length].count("\n") - 1, 0)  # lines but the header
        assert read_metrics(path) == whole[:complete], content[:length]


def test_no_metrics_yet(run):
    assert read_metrics(run.file("metrics.csv")) == []
    MetricsCSV(run).rewind(5)
    assert not run.file("metrics.csv").exists()


def test_the_logger_says_where_it_is(run):
    logger = MetricsCSV(run)
    assert (logger.name, logger.version, logger.save_dir) == ("fit", "version_0", str(run.path))
    fresh = MetricsCSV(Run("runs", "test"))
    assert (fresh.name, fresh.version, fresh.save_dir) == ("test", "", "runs")
