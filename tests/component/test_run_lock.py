"""Only one process at a time writes into a run."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from run_holders import another

from finetune.runs import run_lock


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    run_lock.release()
    yield
    run_lock.release()


def test_a_second_process_names_the_first_until_that_releases(tmp_path):
    run_lock.hold(tmp_path)
    run_lock.hold(tmp_path)  # the same process may
    reported = another(tmp_path).communicate(timeout=60)[0]
    assert f"another process, {os.getpid()}, is writing {tmp_path}" in reported
    run_lock.release()
    assert another(tmp_path).communicate(timeout=60)[0] == "held\n"
    run_lock.hold(tmp_path)


LOOKS = """
import fcntl, sys, time
with open(sys.argv[1]) as file:
    fcntl.lockf(file, fcntl.LOCK_SH)
    print("looking", flush=True)
    time.sleep(0.3)
"""


def test_a_process_that_looks_for_the_lock_as_runs_does_stops_no_fit_that_begins(tmp_path):
    run_lock.hold(tmp_path)
    run_lock.release()
    looking = [sys.executable, "-c", LOOKS, tmp_path / ".lock"]
    with subprocess.Popen(looking, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "looking\n"
        run_lock.hold(tmp_path)
    assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    first = another(tmp_path)
    assert first.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"another process, {first.pid}, is writing"):  # control
        run_lock.hold(tmp_path)
    first.kill()
    first.communicate(timeout=60)
    run_lock.hold(tmp_path)
    assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_run_that_another_process_writes_into_is_not_resumed(run, cli, tmp_path):
    folder = run()
    before = (folder / "checkpoints/last.ckpt").read_bytes()
    other = another(folder)
    assert other.stdout.readline() == "held\n"
    more = ["fit", "--resume", folder, "--epochs", 2]
    with pytest.raises(ValueError, match=f"another process, {other.pid}, is writing"):
        cli(*more)
    assert (folder / "checkpoints/last.ckpt").read_bytes() == before
    other.communicate(timeout=60)
    cli(*more)  # the control
    assert (folder / "checkpoints/last.ckpt").read_bytes() != before


def test_temporary_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    left = [".steps.csv.0a1b2c3d.tmp", "checkpoints/.last.ckpt.0a1b2c3d.tmp"]
    others = [".hidden.tmp", "steps.csv"]  # the control
    for name in [*left, *others]:
        (tmp_path / name).touch()
    other = another(tmp_path)
    assert other.stdout.readline() == "held\n"
    assert not any((tmp_path / name).exists() for name in left)
    (tmp_path / left[0]).touch()
    with pytest.raises(ValueError, match="another process"):
        run_lock.hold(tmp_path)
    assert (tmp_path / left[0]).exists()  # the other process is writing it
    other.communicate(timeout=60)
    assert all((tmp_path / name).exists() for name in others)


KILLED = """
import os, subprocess, sys
from pathlib import Path
from finetune.runs.run_lock import descriptors_for_children, hold, wait_for_children
run = Path(sys.argv[1])
hold(run)
wait_for_children(run)
subprocess.Popen(["sleep", sys.argv[2]], pass_fds=descriptors_for_children(run))
os._exit(9)
"""


def test_a_command_waits_for_the_children_of_one_that_was_killed(tmp_path, monkeypatch):
    run_lock.wait_for_children(tmp_path)
    assert run_lock.descriptors_for_children(tmp_path)
    run_lock.release()
    assert not run_lock.descriptors_for_children(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, tmp_path, "2"], timeout=60)
    run_lock.hold(tmp_path)  # the command itself has ended
    with monkeypatch.context() as impatient:
        impatient.setattr(run_lock, "_LONGEST_END", 0.2)
        with pytest.raises(ValueError, match="processes of an earlier command still write"):
            run_lock.wait_for_children(tmp_path)
    run_lock.release()
    run_lock.wait_for_children(tmp_path)
    run_lock.release()


def test_a_run_on_a_file_system_without_locks_is_written(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        run_lock.hold(tmp_path)
        run_lock.wait_for_children(tmp_path)
        assert not run_lock.is_held(tmp_path)
    run_lock.release()
