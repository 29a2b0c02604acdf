"""One process at a time goes on in a run."""

import os
from functools import partial
from unittest.mock import Mock

import pytest
from colours import QUICKEST
from run_holders import another

from finetune.runs import run_lock
from finetune.runs.resume import beginning


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    monkeypatch.setattr(run_lock, "_held", {})


def test_a_second_process_is_told_which_one_is_there_until_that_releases(tmp_path):
    run_lock.hold(tmp_path)
    run_lock.hold(tmp_path)  # the same process may
    told = another(tmp_path).communicate(timeout=60)[0]
    assert told == f"another process, {os.getpid()}, goes on in {tmp_path}: wait for its end, or end it\n"
    run_lock.release()
    assert another(tmp_path).communicate(timeout=60)[0] == "held\n"
    run_lock.hold(tmp_path)


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    first = another(tmp_path)
    assert first.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"another process, {first.pid}, goes on in"):  # control
        run_lock.hold(tmp_path)
    first.kill()
    first.communicate(timeout=60)
    run_lock.hold(tmp_path)
    assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_whether_another_is_there_can_be_seen_without_taking_its_place(tmp_path):
    run_lock.check_free(tmp_path)
    assert not (tmp_path / ".lock").exists()
    first = another(tmp_path)
    assert first.stdout.readline() == "held\n"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"another process, {first.pid}, goes on in"):
            run_lock.check_free(tmp_path)
    first.kill()
    first.communicate(timeout=60)
    run_lock.check_free(tmp_path)
    run_lock.hold(tmp_path)
    run_lock.check_free(tmp_path)  # one's own
    assert another(tmp_path).communicate(timeout=60)[0] != "held\n"  # and it is held as before


def test_a_run_that_another_process_has_begun_is_seen_before_its_first_checkpoint(tmp_path):
    """Its folder is not there before all of its processes have looked, so that none refuses the others."""
    (tmp_path / "fit/version_0/checkpoints").mkdir(parents=True)
    (begun := tmp_path / "fit/version_1").mkdir()
    begin = partial(beginning, Mock(), tmp_path, ckpt_path=None)
    other = another(begun)
    assert other.stdout.readline() == "held\n"
    assert begin(resume=False).run is None  # a run of its own
    for has_checkpoint in (False, True):
        if has_checkpoint:
            (tmp_path / "fit/version_0/checkpoints/last.ckpt").touch()
        with pytest.raises(ValueError, match=f"another process, {other.pid}, goes on in {begun}"):
            begin(resume=True)
    (tmp_path / "fit/version_0/checkpoints/last.ckpt").unlink()
    (begun / "config.yaml").write_text("trainer: {fast_dev_run: true}")
    assert begin(resume=True).run is None  # a try has nothing to go on with
    (begun / "config.yaml").unlink()
    other.communicate(timeout=60)
    assert begin(resume=True).run is None  # the control


def test_a_run_that_another_process_writes_into_is_not_resumed(colours, cli, tmp_path):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    cli(*fit)
    run_lock.release()
    run = tmp_path / "runs/fit/version_0"
    last = (run / "checkpoints/last.ckpt").read_bytes()
    other = another(run)
    assert other.stdout.readline() == "held\n"
    more = [*fit, "--resume", "--trainer.max_epochs", 2]
    with pytest.raises(ValueError, match=f"another process, {other.pid}, goes on in"):
        cli(*more)
    assert (run / "checkpoints/last.ckpt").read_bytes() == last
    other.communicate(timeout=60)
    cli(*more)  # the control
    assert (run / "checkpoints/last.ckpt").read_bytes() != last
    run_lock.release()
