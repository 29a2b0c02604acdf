"""metrics.csv and steps.csv continue after a restart as if there had been none."""

import csv

import pytest

from finetune.runs.folder import Run
from finetune.runs.metrics_csv import MetricsCSV, read_metrics


def rows(run: Run) -> list[dict[str, str]]:
    with open(run.file("steps.csv"), newline="", encoding="utf-8") as file:
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
        with open(resumed.file("steps.csv"), "a") as file:
            file.write("9,0.12")  # in the middle of a row
    log(resumed, saved_at, 7)
    assert read_metrics(resumed.file("steps.csv")) == read_metrics(alone.file("steps.csv"))


def test_a_half_written_last_row_is_left_out_wherever_it_breaks(run):
    logger = MetricsCSV(run)
    for step in range(3):
        logger.log_metrics({"loss": 0.125 + step, "val": 0.75}, step)
    path = run.file("steps.csv")
    content, full = path.read_text(), read_metrics(path)
    for length in range(len(content)):
        path.write_text(content[:length])
        complete = max(content[:length].count("\n") - 1, 0)  # lines but the header
        assert read_metrics(path) == full[:complete], content[:length]


def test_what_ends_a_line_elsewhere_may_be_in_a_class_s_name(run):
    logger = MetricsCSV(run)
    logger.log_metrics({"val/recall/a\u2028b\x85c": 1.0}, 0)
    logger.log_metrics({"val/recall/a\u2028b\x85c": 0.5, "loss": 1.0}, 1)
    assert [row["val/recall/a\u2028b\x85c"] for row in read_metrics(run.file("steps.csv"))] == [
        "1.0",
        "0.5",
    ]


def test_no_metrics_yet(run):
    assert read_metrics(run.file("steps.csv")) == []
    MetricsCSV(run).rewind(5)
    assert not run.file("steps.csv").exists()


def test_the_logger_says_where_it_is(run):
    logger = MetricsCSV(run)
    assert (logger.name, logger.version, logger.save_dir) == ("fit", "version_0", str(run.path))
    fresh = MetricsCSV(Run("runs", "test"))
    assert (fresh.name, fresh.version, fresh.save_dir) == ("test", "", "runs")


def log_epochs(run: Run, first: int, last: int, killed_at: int | None = None) -> None:
    """Steps from `first` to `last`, four an epoch, as Lightning logs them; the fourth epoch is not validated."""
    logger = MetricsCSV(run)
    logger.rewind(first)
    for step in range(first, last):
        epoch = step // 4
        logger.log_metrics({"lr-SGD/head": 0.1 * step}, step)
        logger.log_metrics({"train/loss": float(step), "epoch": epoch}, step)
        if step == killed_at:
            return
        if step % 4 == 3:
            if epoch != 3:
                logger.log_metrics(
                    {"val/loss": epoch / 10, "val/accuracy": epoch / 5, "epoch": epoch}, step
                )
            logger.log_metrics(
                {"train/loss_epoch": step - 1.5, "train/accuracy": 0.5, "epoch": epoch}, step
            )
            logger.log_epoch(epoch + 1, step + 1, 0.25)


def test_an_epoch_is_one_full_row(run):
    log_epochs(run, 0, 20)
    first, _, _, unvalidated, last = read_metrics(run.file("metrics.csv"))
    columns = [
        "epoch",
        "step",
        "seconds",
        "train/loss",
        "train/accuracy",
        "val/loss",
        "val/accuracy",
        "lr-SGD/head",
    ]
    assert list(first) == columns
    assert all(first.values()) and all(last.values())
    assert [float(value) for value in last.values()] == [
        5,
        20,
        0.25,
        17.5,
        0.5,
        0.4,
        0.8,
        pytest.approx(1.9),
    ]
    # and not those of the epoch before
    assert unvalidated["val/loss"] == unvalidated["val/accuracy"] == ""


@pytest.mark.parametrize(
    ("saved_at", "killed_at"), [(0, 2), (4, 4), (4, 9), (6, 6), (6, 11), (12, 15), (15, 18)]
)
def test_epochs_of_a_run_killed_and_resumed_are_those_of_one_left_alone(
    tmp_path, saved_at, killed_at
):
    alone, resumed = Run(tmp_path, "fit"), Run(tmp_path, "fit")
    alone.choose(), resumed.choose()
    log_epochs(alone, 0, 20)
    log_epochs(resumed, 0, 20, killed_at)
    log_epochs(resumed, saved_at, 20)
    assert read_metrics(resumed.file("metrics.csv")) == read_metrics(alone.file("metrics.csv"))


def test_what_was_logged_before_a_resume_inside_an_epoch_is_in_its_row(run):
    logger = MetricsCSV(run)
    logger.log_metrics({"val/loss": 0.5, "epoch": 0}, 1)  # validated in the middle of an epoch
    resumed = MetricsCSV(run)
    resumed.rewind(2)
    resumed.log_metrics({"train/loss_epoch": 1.0, "epoch": 0}, 3)
    resumed.log_epoch(1, 4, 0.25)
    (row,) = read_metrics(run.file("metrics.csv"))
    assert (row["val/loss"], row["train/loss"]) == ("0.5", "1.0")


def test_a_run_that_a_limit_ended_inside_an_epoch_has_it_once_when_it_continues(run):
    logger = MetricsCSV(run)
    logger.log_metrics({"train/loss_epoch": 3.0, "epoch": 0}, 1)
    logger.log_epoch(1, 2, 0.25)
    resumed = MetricsCSV(run)
    resumed.rewind(2)
    resumed.log_metrics({"train/loss_epoch": 2.0, "epoch": 0}, 3)
    resumed.log_epoch(1, 4, 0.5)
    (row,) = read_metrics(run.file("metrics.csv"))
    assert (row["step"], row["train/loss"]) == ("4", "2.0")


def test_a_test_has_its_result_in_a_file_of_its_own(tmp_path):
    run = Run(tmp_path, "test")
    run.choose()
    MetricsCSV(run).log_metrics({"test/loss": 0.5}, 0)
    assert not list(run.path.iterdir())


def test_rates_are_there_where_no_step_logged_them(run):
    logger = MetricsCSV(run)
    logger.log_metrics({"train/loss_epoch": 1.0, "epoch": 0}, 3)
    logger.log_epoch(1, 4, 0.25, {"lr-SGD/head": 0.5})
    assert read_metrics(run.file("metrics.csv"))[0]["lr-SGD/head"] == "0.5"
