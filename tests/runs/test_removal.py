"""Only runs are deleted, only completely, and only while no process writes them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from run_folders import write_run
from run_holders import another

from finetune.runs.fold_record import FoldRecord, write_folds
from finetune.runs.removal import delete_run, plan_removal
from finetune.system.messages import WrongUsage


@pytest.fixture
def run(tmp_path) -> Path:
    run = write_run(tmp_path / "runs/fit/version_0", [0, 1, 2], np.eye(3))
    (run / "checkpoints").mkdir()
    (run / "checkpoints/last.ckpt").write_bytes(b"x" * 500)
    return run


def test_a_run_is_deleted_whole(run):
    planned = plan_removal(run)
    assert planned.num_bytes == sum(
        file.stat().st_size for file in run.rglob("*") if file.is_file()
    )
    assert run.is_dir()
    assert planned.execute() == planned.num_bytes
    assert not run.exists() and run.parent.is_dir()


def test_what_is_no_run_is_refused(run, tmp_path):
    (tmp_path / "data/cat").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "data", run.parent, run.parents[1], run / "checkpoints"):
        with pytest.raises(WrongUsage, match="is not the folder of a run"):
            plan_removal(folder)
    with pytest.raises(FileNotFoundError):
        plan_removal(tmp_path / "nowhere")
    with pytest.raises(WrongUsage):
        plan_removal(run / "config.yaml")


def test_links_are_refused(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(WrongUsage, match="symbolic link"):
        plan_removal(tmp_path / "link")
    (run / "wandb").mkdir()
    (run / "wandb/latest").symlink_to(run / "checkpoints")  # which does not lead out
    plan_removal(run)
    outside = tmp_path / "outside"
    shutil.move(run / "checkpoints", outside)
    (run / "checkpoints").symlink_to(outside)
    for only_last in (False, True):
        with pytest.raises(WrongUsage, match="leads out of the run"):
            plan_removal(run, only_last)
    assert (outside / "last.ckpt").is_file()


def test_a_run_that_is_being_written_is_refused(run):
    process = another(run)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        for act in (plan_removal, delete_run):
            with pytest.raises(ValueError, match="another process"):
                act(run)
    finally:
        process.communicate()
    assert (run / "test.json").is_file()
    plan_removal(run)


def test_last_ckpt_of_an_unfinished_run_stays(run):
    (run / "test.json").unlink()
    with pytest.raises(WrongUsage, match="is unfinished, not finished"):
        plan_removal(run, only_last=True)
    (run / "test.json").write_text('{"test/accuracy": 1}')
    with pytest.raises(WrongUsage, match=r"no best\.ckpt"):
        plan_removal(run, only_last=True)


def test_a_fold_is_only_deleted_with_its_cross_validation(run):
    full = write_run(run.parent / "version_1", [0, 1, 2], np.eye(3))
    fold = full / "fit/fold_1"
    shutil.copytree(run, fold)
    plan_removal(fold)  # the control: no cross-validation
    write_folds(full, FoldRecord(2, [], "."))
    (fold / "checkpoints/best.ckpt").write_bytes(b"")
    with pytest.raises(WrongUsage, match=r"finetune runs rm \S+/runs/fit/version_1$"):
        plan_removal(fold)
    plan_removal(full)
