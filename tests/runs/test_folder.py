"""Run folders that never meet, and are the same on all devices."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.commands.parser import OneLineErrorParser
from finetune.runs.folder import Run, RunFolder, is_try, versions


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


@pytest.mark.timeout(20)
def test_a_name_that_is_taken_by_no_folder_is_passed_over(tmp_path):
    (tmp_path / "fit/version_0").mkdir(parents=True)
    (tmp_path / "fit/version_1").write_text("a file")
    (tmp_path / "fit/version_2").symlink_to(tmp_path / "gone")
    assert Run(tmp_path, "fit").choose().name == "version_3"


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

    return SimpleNamespace(
        is_global_zero=rank == 0, ckpt_path=None, strategy=SimpleNamespace(broadcast=broadcast)
    )


def test_rank_0_chooses_the_folder_and_hands_it_to_the_others(tmp_path):
    said: list = []
    devices = [Run(tmp_path, "fit") for _ in range(3)]
    for rank, device in enumerate(devices):
        callback(device).setup(trainer(rank, said), None, "fit")
    assert (
        {device.path for device in devices}
        == {tmp_path / "fit/version_0"}
        == set(versions(tmp_path, "fit"))
    )
    text = (tmp_path / "fit/version_0/config.yaml").read_text()
    assert "epochs: 3" in text and "name: null" in text  # complete: it makes the same run again
    # one that would go on elsewhere
    with pytest.raises(RuntimeError, match="version_7, rank 0 in .*version_0"):
        callback(Run(tmp_path, "fit", tmp_path / "fit/version_7")).setup(
            trainer(1, said), None, "fit"
        )


def test_an_error_says_at_once_that_this_process_is_at_its_end(run, monkeypatch):
    monkeypatch.setattr("finetune.runs.folder.ending", ending := threading.Event())
    callback(Run(run.root, "test")).on_exception(trainer(0, []), None, RuntimeError())
    assert not ending.is_set()  # nothing waits to be written
    callback(run).on_exception(trainer(0, []), None, RuntimeError())
    assert ending.is_set()


@pytest.mark.parametrize(("stage", "epochs"), [("fit", 5), ("test", 3)])
def test_the_config_is_that_of_the_last_fit(run, stage, epochs):
    callback(run, 3).setup(trainer(0, []), None, "fit")
    # resumed, or tested after fit
    callback(Run(run.root, "fit", run.path), 5).setup(trainer(0, []), None, stage)
    assert f"epochs: {epochs}" in run.file("config.yaml").read_text()


def test_a_rank_that_does_not_see_the_checkpoint_of_rank_0_is_stopped(tmp_path):
    said: list = []
    resumed = trainer(0, said)
    resumed.ckpt_path = tmp_path / "last.ckpt"
    callback(Run(tmp_path, "fit")).setup(resumed, None, "fit")
    with pytest.raises(OSError, match="on a shared disk"):
        callback(Run(tmp_path, "fit")).setup(trainer(1, said), None, "fit")


def test_how_a_run_began_stays_in_about_json_when_others_go_on_with_it(run):
    for command, line in (("first", "pretrained"), ("second", "last.ckpt"), ("third", "last.ckpt")):
        run.about = {"command": command, "lines": [line], "root": command}
        callback(run).setup(trainer(0, []), None, "fit")
    told = json.loads(run.file("about.json").read_text())
    assert told == {
        "command": "first",
        "lines": ["pretrained"],
        "root": "third",
        "went_on_by": ["second", "third"],
    }


def test_a_try_is_told_by_its_config(tmp_path):
    assert not is_try(tmp_path)
    tries = ("trainer: {fast_dev_run: true}", "trainer: {fast_dev_run: 2}")
    others = ("trainer: {fast_dev_run: false}", "trainer: {max_epochs: 1}", "trainer:", "a: [", "")
    for config in (*tries, *others):
        (tmp_path / "config.yaml").write_text(config)
        assert is_try(tmp_path) is (config in tries), config
