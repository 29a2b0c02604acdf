"""Run folders never collide, and are the same on all ranks."""

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.commands.parser import OneLineErrorParser
from finetune.data.datasets.folders import scan
from finetune.runs import run_lock
from finetune.runs.folder import Run, RunFolder, check_name, versions
from finetune.runs.local_copies import local_copy
from finetune.system.messages import WrongUsage


def test_each_run_is_a_new_version(tmp_path):
    chosen = [Run(tmp_path / "runs", command).choose() for command in ("fit", "fit", "test", "fit")]
    assert [path.relative_to(tmp_path).as_posix() for path in chosen] == [
        "runs/fit/version_0",
        "runs/fit/version_1",
        "runs/test/version_0",
        "runs/fit/version_2",
    ]
    assert all(path.is_dir() for path in chosen)


def test_a_folder_that_cannot_be_written_is_named_with_the_option_for_another(
    tmp_path, monkeypatch
):
    run = Run(tmp_path, "fit")
    run.choose()

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write everywhere
    with pytest.raises(OSError, match="Permission denied: .*/fit; --out FOLDER"):
        Run(tmp_path, "fit").choose()
    with pytest.raises(OSError, match="; --out FILE.csv writes elsewhere"):
        Run(tmp_path, "predict").choose()
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="Permission denied: .*FINETUNE_CACHE"):
        Run(local_copy("s3://bucket/runs"), "fit").choose()  # --out FOLDER is an address


def test_versions_count_on_from_the_highest_and_sort_as_numbers(tmp_path):
    for name in ("version_9", "version_10", "version_x", "version_", "version_3_old", "other"):
        (tmp_path / "fit" / name).mkdir(parents=True)
    (tmp_path / "fit/version_11").write_text("a file")
    assert [path.name for path in versions(tmp_path, "fit")] == ["version_9", "version_10"]
    (tmp_path / "fit/version_11").unlink()
    assert Run(tmp_path, "fit").choose().name == "version_11"
    assert versions(tmp_path / "nowhere", "fit") == []


def test_folders_of_runs_among_the_images_are_no_data(tmp_path, monkeypatch):
    for name in ("train/cat/1.png", "train/dog/1.png", "test/cat/1.png", "test/dog/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    before = scan(".")
    runs = [Run(root, command).choose() for root in ("runs", ".") for command in ("fit", "test")]
    for run in runs:
        (run / "1.png").touch()
    names, splits = scan(".")
    assert names == before[0] and splits.keys() == before[1].keys()
    assert all(list(splits[name].paths) == list(before[1][name].paths) for name in splits)
    marks = sorted(path.as_posix() for path in Path().rglob(".finetune"))
    assert marks == ["fit/.finetune", "runs/.finetune", "test/version_0/.finetune"]
    for mark in marks:
        Path(mark).unlink()
    with pytest.raises(ValueError, match="has the class 'version_0'"):
        scan(".")  # the control


def test_a_run_may_have_a_name(tmp_path):
    Run(tmp_path, "fit").choose()
    assert Run(tmp_path, "fit", name="mine").choose() == tmp_path / "fit/mine"
    run_lock.release()
    assert Run(tmp_path, "fit").choose() == tmp_path / "fit/version_1"
    # it has no result: a fit that is started again takes its folder
    assert Run(tmp_path, "fit", name="mine").choose() == tmp_path / "fit/mine"
    run_lock.release()
    (tmp_path / "fit/mine/metrics.csv").touch()
    with pytest.raises(WrongUsage, match="fit/mine exists already"):
        Run(tmp_path, "fit", name="mine").choose()
    (tmp_path / "fit/file").touch()
    with pytest.raises(WrongUsage, match="fit/file exists already"):
        Run(tmp_path, "fit", name="file").choose()


def test_a_named_run_does_not_continue_one_that_was_killed_before_its_first_result(tmp_path):
    run = tmp_path / "fit/mine"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("about.json", "seconds.json", "loggers.json", "checkpoints/start.ckpt"):
        (run / name).write_text('{"finetune": "0.1.0"}')
    (run / "steps.csv").write_text("step,epoch,lr-SGD\n3,0,0.1\n")
    assert Run(tmp_path, "fit", name="mine").choose() == run
    assert {path.name for path in run.rglob("*") if path.is_file()} == {".lock", ".finetune"}
    (run / "metrics.csv").touch()  # a result
    with pytest.raises(WrongUsage, match="exists already"):
        Run(tmp_path, "fit", name="mine").choose()
    assert (run / "metrics.csv").exists()


@pytest.mark.parametrize("name", ["exp1", "Über 2", "a.b", "version_x", "5", "a_b+c,d"])
def test_names(name):
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".a",
        "a/b",
        "/a",
        "a/",
        "a\\b",
        "-a",
        " a",
        "a ",
        "a\nb",
        "version_3",
        "a" * 101,
    ],
)
def test_names_that_are_no_plain_component_of_a_path(name):
    with pytest.raises(WrongUsage, match="--name"):
        check_name(name)


def test_a_run_without_a_result_leaves_nothing(tmp_path):
    run = Run(tmp_path / "a/runs", "fit")
    run.choose()
    (run.file("checkpoints")).mkdir()
    for name in ("config.yaml", "about.json", "checkpoints/start.ckpt"):
        run.file(name).touch()
    # the control: a metric is a result, a learning rate is none
    run.file("steps.csv").write_text("step,epoch,lr-AdamW/head,train/loss\n0,0,0.1,2.5\n")
    run.discard_if_empty()
    run.file("steps.csv").write_text("step,epoch,lr-AdamW/head\n0,0,0.1\n")
    run.discard_if_empty()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["checkpoints/last.ckpt", "metrics.csv", "skipped.txt", "mine.txt"]
)
def test_a_run_with_a_result_stays(tmp_path, name):
    run = Run(tmp_path, "fit")
    run.choose()
    run.checkpoint("x").parent.mkdir()
    run.file(name).touch()
    run.discard_if_empty()
    assert run.file(name).exists()
    # that of another command
    (tmp_path / "fit/version_7").mkdir()
    other = Run(tmp_path, "fit", tmp_path / "fit/version_7")
    other.discard_if_empty()
    assert (tmp_path / "fit/version_7").is_dir()


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


def trainer(rank: int, printed_by_rank_0: list) -> SimpleNamespace:
    def broadcast(value):
        if rank == 0:
            printed_by_rank_0[:] = [value]
        return printed_by_rank_0[0]

    return SimpleNamespace(
        is_global_zero=rank == 0, ckpt_path=None, strategy=SimpleNamespace(broadcast=broadcast)
    )


def test_rank_0_chooses_the_folder_and_hands_it_to_the_others(tmp_path):
    output: list = []
    devices = [Run(tmp_path, "fit") for _ in range(3)]
    for rank, device in enumerate(devices):
        callback(device).setup(trainer(rank, output), None, "fit")
    assert (
        {device.path for device in devices}
        == {tmp_path / "fit/version_0"}
        == set(versions(tmp_path, "fit"))
    )
    text = (tmp_path / "fit/version_0/config.yaml").read_text()
    assert "epochs: 3" in text and "name: null" in text  # complete: it makes the same run again
    # one that would continue elsewhere
    with pytest.raises(RuntimeError, match="version_7, rank 0 .*version_0"):
        callback(Run(tmp_path, "fit", tmp_path / "fit/version_7")).setup(
            trainer(1, output), None, "fit"
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
    output: list = []
    resumed = trainer(0, output)
    resumed.ckpt_path = tmp_path / "last.ckpt"
    callback(Run(tmp_path, "fit")).setup(resumed, None, "fit")
    with pytest.raises(OSError, match="on a shared disk"):
        callback(Run(tmp_path, "fit")).setup(trainer(1, output), None, "fit")


def test_how_a_run_began_stays_in_about_json_when_others_continue_with_it(run):
    for command, line in (("first", "pretrained"), ("second", "last.ckpt"), ("third", "last.ckpt")):
        run.about = {"command": command, "lines": [line], "root": command}
        callback(run).setup(trainer(0, []), None, "fit")
    reported = json.loads(run.file("about.json").read_text())
    assert reported == {
        "finetune": "0.1.0",
        "command": "first",
        "lines": ["pretrained"],
        "root": "third",
        "went_on_by": ["second", "third"],
    }


def test_a_temporary_file_is_no_result_so_the_name_of_a_killed_run_is_free(tmp_path):
    run = tmp_path / "fit/first"
    run.mkdir(parents=True)
    (run / ".steps.csv.0a1b2c3d.tmp").touch()
    assert Run(tmp_path, "fit", name="first").choose() == run
    assert {path.name for path in run.iterdir()} == {".lock", ".finetune"}
    run_lock.release()
    (run / "steps.tmp").touch()  # the control: a file of the user
    with pytest.raises(WrongUsage, match="exists already"):
        Run(tmp_path, "fit", name="first").choose()
