"""Only runs are deleted, only the files that finetune wrote, and only while no process writes them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from promise import promise
from run_folders import write_run
from run_holders import another

from finetune.runs.facts import Facts
from finetune.runs.removal import check_removable, delete_run
from finetune.runs.run_dir import RunDir
from finetune.system.messages import WrongUsage


@pytest.fixture
def run(tmp_path) -> Path:
    run = write_run(tmp_path / "runs/fit/version_0", [0, 1, 2], np.eye(3))
    (run / "checkpoints").mkdir()
    (run / "checkpoints/last.ckpt").write_bytes(b"x" * 500)
    return run


def make_cross_validation(run: Path) -> None:
    RunDir(run).update(identity={"folds": 2})


def test_a_run_is_deleted_whole(run):
    make_cross_validation(run)
    for name in (
        *("wandb/run-1/files/a.wandb", "checkpoints/best.timm/model.safetensors", ".sync"),
        *("checkpoints/best.int8.onnx", "checkpoints/best.int8.onnx.json", ".uploaded.json"),
        *("fit/.finetune", "fit/fold_1/.finetune", "test/version_0/test_predictions.csv"),
        *("fit/fold_1/checkpoints/.best.ckpt.0a1b2c3d.tmp", "checkpoints/.best.onnx.lock"),
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    assert delete_run(run) == []
    assert not run.exists() and run.parent.is_dir()


@promise("runs-rm")
def test_files_of_others_in_a_run_stay(run, tmp_path):
    own = [
        *("notes.txt", "checkpoints/mine.pt", "fit/fold_1/thesis.tex", "sub/config.yaml"),
        *(
            "checkpoints/best.timm/notes.txt",
            "checkpoints/last.ckpt.copy",
            "fit/version_0/test.json",
        ),
    ]
    for name in own:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/best.ckpt").touch()
    (run / "tensorboard").symlink_to(tmp_path / "outside")
    assert delete_run(run) == sorted(run / name for name in [*own, "tensorboard"])
    assert sorted(path for path in run.rglob("*") if path.is_file()) == sorted(
        run / name for name in own
    )
    assert (tmp_path / "outside/best.ckpt").exists()


def take_any_folder_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDir, "facts", Facts(kind="fit"))
    monkeypatch.setattr(RunDir, "is_run", True)


@promise("runs-rm", controls=[take_any_folder_for_a_run])
@pytest.mark.parametrize(
    "record", ["{}", "[]", '{"name": "an app", "began": "today"}', '{"kind": "fit", "epochs": 1}']
)
def test_what_is_no_run_is_refused(run, tmp_path, record):
    other = tmp_path / "project/fit/version_3"
    (other / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/last.ckpt", ".lock", "thesis.txt"):
        (other / name).touch()
    (other / "run.json").write_text(record)
    for folder in (other, tmp_path, run.parent, run / "checkpoints", run / "config.yaml"):
        with pytest.raises(WrongUsage, match="not the folder of a run"):
            check_removable(folder)
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(WrongUsage, match="not the folder of a run"):
        check_removable(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        check_removable(tmp_path / "nowhere")


@pytest.mark.parametrize("record", ["", "{", '{"finetune": "0.1.0", "epochs": -1}'])
def test_a_run_with_a_damaged_record_is_refused(run, record):
    (run / "run.json").write_text(record)
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        check_removable(run)


@pytest.mark.parametrize(
    ("written", "acts"), [(".", (check_removable, delete_run)), ("fit/fold_1", (check_removable,))]
)
def test_a_run_that_is_being_written_is_refused(run, written, acts):
    if written != ".":
        shutil.copytree(run, run / written)
        make_cross_validation(run)
    process = another(run / written)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        for act in acts:
            with pytest.raises(ValueError, match="another process"):
                act(run)
    finally:
        process.communicate()
    assert (run / "test.json").is_file()
    check_removable(run)


def test_a_fold_is_only_deleted_with_its_cross_validation(run):
    full = write_run(run.parent / "version_1", [0, 1, 2], np.eye(3))
    fold = full / "fit/fold_1"
    shutil.copytree(run, fold)
    check_removable(fold)  # the control: no cross-validation
    make_cross_validation(full)
    with pytest.raises(WrongUsage, match=r"runs rm \S+/version_1$"):
        check_removable(fold)
    check_removable(full)
    assert delete_run(full) == [] and not full.exists()


def test_another_run_in_the_folder_of_a_run_stays(run):
    shutil.copytree(run, run / "old/mine")
    check_removable(run)
    assert run / "old/mine/run.json" in delete_run(run)
    assert RunDir(run / "old/mine").is_run and not RunDir(run).is_run
