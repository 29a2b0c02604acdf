"""Run folders that never meet, metrics that go on after a restart, and text files that are never half written."""

import csv
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.commands.parser import OneLineErrorParser
from finetune.runs.folder import Run, RunFolder, newest_with_checkpoint, versions
from finetune.runs.metrics_csv import MetricsCSV, read_metrics
from finetune.runs.results import write_results
from finetune.system.files import replace_text


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path, "fit")
    run.choose()
    return run


def test_each_run_is_a_new_version(tmp_path):
    chosen = [Run(tmp_path / "runs", command).choose() for command in ("fit", "fit", "test", "fit")]
    assert [path.relative_to(tmp_path).as_posix() for path in chosen] == [
        "runs/fit/version_0",
        "runs/fit/version_1",
        "runs/test/version_0",
        "runs/fit/version_2",
    ]
    assert all(path.is_dir() for path in chosen)


def test_versions_count_on_from_the_highest_and_sort_as_numbers(tmp_path):
    for name in ("version_9", "version_10", "version_x", "version_", "version_3_old", "other"):
        (tmp_path / "fit" / name).mkdir(parents=True)
    (tmp_path / "fit/version_11").write_text("a file")
    assert [path.name for path in versions(tmp_path, "fit")] == ["version_9", "version_10"]
    (tmp_path / "fit/version_11").unlink()
    assert Run(tmp_path, "fit").choose().name == "version_11"
    assert versions(tmp_path / "nowhere", "fit") == []


def test_a_chosen_run_stays_in_its_folder(run):
    assert run.choose() == run.choose() == run.path
    assert run.file("metrics.csv") == run.path / "metrics.csv"
    assert run.checkpoint("best") == run.path / "checkpoints/best.ckpt"


def test_runs_that_begin_at_once_get_a_folder_each(tmp_path):
    with ThreadPoolExecutor(16) as threads:
        chosen = list(threads.map(lambda _: Run(tmp_path, "fit").choose(), range(32)))
    assert sorted(chosen) == sorted(tmp_path / f"fit/version_{i}" for i in range(32))


def test_a_folder_that_another_takes_in_between_is_left_to_it(tmp_path, monkeypatch):
    mkdir, taken = Path.mkdir, []

    def slow(path: Path, **options) -> None:
        if path.name == "version_0" and not taken:
            taken.append(mkdir(path))  # another process was faster
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", slow)
    assert Run(tmp_path, "fit").choose().name == "version_1" and taken


def test_resume_finds_the_newest_run_that_has_a_checkpoint(tmp_path):
    assert newest_with_checkpoint(tmp_path) is None
    for _ in range(11):
        Run(tmp_path, "fit").choose()
    assert newest_with_checkpoint(tmp_path) is None
    for i in 2, 10, 9:  # the number counts, not the time of writing
        path = tmp_path / f"fit/version_{i}/checkpoints/last.ckpt"
        path.parent.mkdir()
        path.write_bytes(b"x")
    assert newest_with_checkpoint(tmp_path) == tmp_path / "fit/version_10"
    (tmp_path / "fit/version_10/checkpoints/last.ckpt").rename(tmp_path / "fit/version_10/checkpoints/best.ckpt")
    assert newest_with_checkpoint(tmp_path) == tmp_path / "fit/version_9"


# The run's folder, chosen once for all ranks


def callback(run: Run, epochs: int = 3) -> RunFolder:
    parser = OneLineErrorParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--name", type=str | None, default=None)
    return RunFolder(run, parser, parser.parse_args([f"--epochs={epochs}"]))


def trainer(rank: int, said_by_rank_0: list) -> SimpleNamespace:
    def broadcast(value):
        if rank == 0:
            said_by_rank_0[:] = [value]
        return said_by_rank_0[0]

    return SimpleNamespace(is_global_zero=rank == 0, ckpt_path=None, strategy=SimpleNamespace(broadcast=broadcast))


def test_rank_0_chooses_the_folder_and_hands_it_to_the_others(tmp_path):
    said: list = []
    devices = [Run(tmp_path, "fit") for _ in range(3)]
    for rank, device in enumerate(devices):
        callback(device).setup(trainer(rank, said), None, "fit")
    assert {device.path for device in devices} == {tmp_path / "fit/version_0"} == set(versions(tmp_path, "fit"))
    text = (tmp_path / "fit/version_0/config.yaml").read_text()
    assert "epochs: 3" in text and "name: null" in text  # complete: it makes the same run again


def test_a_rank_that_would_go_on_elsewhere_is_stopped(tmp_path):
    said: list = []
    callback(Run(tmp_path, "fit")).setup(trainer(0, said), None, "fit")
    with pytest.raises(RuntimeError, match="version_7, rank 0 in .*version_0"):
        callback(Run(tmp_path, "fit", tmp_path / "fit/version_7")).setup(trainer(1, said), None, "fit")


@pytest.mark.parametrize(("stage", "epochs"), [("fit", 5), ("test", 3)])
def test_the_config_is_that_of_the_last_fit(run, stage, epochs):
    callback(run, 3).setup(trainer(0, []), None, "fit")
    callback(Run(run.root, "fit", run.path), 5).setup(trainer(0, []), None, stage)  # resumed, or tested after fit
    assert f"epochs: {epochs}" in run.file("config.yaml").read_text()


# metrics.csv


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


# Text files


def test_text_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    replace_text(path, "größe: 1\n")
    replace_text(path, "größe: 2\n")
    assert path.read_bytes() == "größe: 2\n".encode()
    write = Path.write_text

    def full(self: Path, text: str, **options) -> int:
        write(self, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "größe: 3\n")
    assert os.listdir(tmp_path) == ["config.yaml"] and path.read_bytes() == "größe: 2\n".encode()


def test_results_are_json(tmp_path):
    results = {"test/accuracy": 0.9375, "class_names": ["größe", "b"], "confusion_matrix": [[1, 0], [0, 2]]}
    write_results(tmp_path / "test.json", results)
    assert json.loads((tmp_path / "test.json").read_text()) == results


def test_a_rank_that_does_not_see_the_checkpoint_of_rank_0_is_stopped(tmp_path):
    said: list = []
    resumed = trainer(0, said)
    resumed.ckpt_path = tmp_path / "last.ckpt"
    callback(Run(tmp_path, "fit")).setup(resumed, None, "fit")
    with pytest.raises(OSError, match="on a shared disk"):
        callback(Run(tmp_path, "fit")).setup(trainer(1, said), None, "fit")
