"""Which run `--resume` continues."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from run_holders import another

from finetune.runs.folder import Run, runs_elsewhere
from finetune.runs.newest_run import NewestRun, RunFilter, find_run, new_run_message
from finetune.runs.run_search import runs_of
from finetune.system.messages import WrongUsage

ANY = RunFilter(None, None, None)


def write_run(
    folder: Path, root: str, backbone: str = "resnet18", begun_in: Path | None = None
) -> Path:
    """Write a run with an empty checkpoint, which a test must not read."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints/last.ckpt").touch()
    data = {"class_path": "finetune.ImageFolderData", "init_args": {"root": root}}
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"data": data, "model": {"backbone": backbone}})
    )
    (folder / "about.json").write_text(json.dumps({"folder": str(begun_in or "")}))
    return folder


def test_it_is_the_newest_that_has_a_checkpoint(tmp_path):
    assert find_run(tmp_path, ANY) == NewestRun(None, {}, None, [], [])
    for _ in range(11):
        Run(tmp_path, "fit").choose()
    assert find_run(tmp_path, ANY).run is None
    for i in 2, 10, 9:  # the number counts, not the time of writing
        write_run(tmp_path / f"fit/version_{i}", "a")
    assert find_run(tmp_path, ANY).run == tmp_path / "fit/version_10"
    (tmp_path / "fit/version_10/checkpoints/last.ckpt").unlink()
    found = find_run(tmp_path, ANY)
    assert (found.run, found.begun) == (tmp_path / "fit/version_9", tmp_path / "fit/version_10")


def test_runs_of_other_data_or_another_network_are_passed_over(tmp_path):
    here = tmp_path / "here"
    write_run(tmp_path / "fit/version_0", "photos", begun_in=here)
    write_run(tmp_path / "fit/version_1", "photos", "resnet50", here)
    # the same name in another folder
    write_run(tmp_path / "fit/version_2", "photos", begun_in=tmp_path)
    (tmp_path / "fit/version_3").mkdir()
    wanted = RunFilter(str(here / "photos"), None, "resnet18")
    run, settings, begun, passed, _ = find_run(tmp_path, wanted)
    assert (run, begun) == (tmp_path / "fit/version_0", tmp_path / "fit/version_3")
    assert settings["model"] == {"backbone": "resnet18"}
    assert [run.name for run, _ in passed] == ["version_2", "version_1"]
    assert f"of other data ({tmp_path}/photos, not " in passed[0][1]
    assert passed[1][1] == "of another network (resnet50, not resnet18)"
    reported = new_run_message(tmp_path, passed, [])
    assert (
        f"since {passed[0][0]} is {passed[0][1]}, and 1 older of others, too: a new run begins"
        in reported
    )
    data_class = RunFilter(wanted.root, "finetune.Hotdog", None)
    assert find_run(tmp_path, data_class).run is None


def test_a_folder_that_has_moved_with_its_runs_is_the_same(tmp_path, monkeypatch):
    before = tmp_path / "before"
    (before / "photos").mkdir(parents=True)
    run = write_run(tmp_path / "fit/version_0", "photos", begun_in=before)
    monkeypatch.chdir(tmp_path)
    wanted = RunFilter("photos", None, None)
    assert find_run(tmp_path, wanted).run is None  # a copy may be of other images
    before.rename(tmp_path / "after")
    assert find_run(tmp_path, wanted).run == run


@pytest.mark.parametrize(
    ("about", "has_result", "is_lost"),
    [
        ('{"ended": "2026-01-01T10:00:00+00:00"}', False, True),
        ('{"began": "2026-01-01T10:00:00+00:00"}', True, True),  # what has been tested has ended
        # killed inside its first epoch, with `val_check_interval` below 1
        ('{"began": "2026-01-01T10:00:00+00:00"}', False, False),
    ],
)
def test_a_run_that_keeps_only_its_best_cannot_continue(tmp_path, about, has_result, is_lost):
    first = write_run(tmp_path / "fit/version_0", "a")
    run = write_run(tmp_path / "fit/version_1", "b")
    (run / "checkpoints/last.ckpt").rename(run / "checkpoints/best.ckpt")
    (run / "about.json").write_text(about)
    if has_result:
        (run / "test.json").write_text("{}")
    if is_lost:
        with pytest.raises(WrongUsage, match=r"version_1 cannot be resumed: its last\.ckpt"):
            find_run(tmp_path, ANY)
        assert find_run(tmp_path, RunFilter("a", None, None)).run == first
    else:
        found = find_run(tmp_path, ANY)
        assert (found.run, found.begun) == (first, run)


def test_runs_that_lie_elsewhere_are_reported(tmp_path):
    for name in ("fit/mine", "fit/version_3", "moved", "later"):
        write_run(tmp_path / name, "a")
    unnamed = runs_elsewhere(tmp_path, runs_of(tmp_path))
    assert unnamed == [tmp_path / "later", tmp_path / "moved"]
    found = NewestRun(tmp_path / "fit/version_3", {}, None, [], unnamed)
    os.utime(tmp_path / "moved/checkpoints/last.ckpt", (0, 0))
    os.utime(tmp_path / "fit/version_3/checkpoints/last.ckpt", (1, 1))
    assert found.newer() == (tmp_path / "later",)
    reported = new_run_message(tmp_path, [], unnamed)
    assert f"{tmp_path}/later is not in" in reported and f"{tmp_path}/moved is not in" in reported


def test_a_run_that_another_process_has_begun_is_seen_before_its_first_checkpoint(tmp_path):
    """Its folder is created after all of its ranks have searched, so that none of them refuses the others."""
    (begun := tmp_path / "fit/version_1").mkdir(parents=True)
    find = partial(find_run, tmp_path)
    other = another(begun)
    assert other.stdout.readline() == "held\n"
    for has_checkpoint in (False, True):
        if has_checkpoint:
            write_run(tmp_path / "fit/version_0", "photos")
        with pytest.raises(ValueError, match=f"another process, {other.pid}, is writing {begun}"):
            find(ANY)
    write_run(tmp_path / "fit/version_2", "trash")
    (tmp_path / "fit/version_2/config.yaml").rename(begun / "config.yaml")
    shutil.rmtree(tmp_path / "fit/version_2")
    # it is of other data
    assert find(RunFilter("photos", None, None)).run == tmp_path / "fit/version_0"
    with pytest.raises(ValueError, match="another process"):
        find(RunFilter("trash", None, None))
    other.communicate(timeout=60)
    assert find(RunFilter("trash", None, None)).begun == begun  # the control
