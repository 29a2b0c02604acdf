"""Runs are found by the files in their folders, and sorted by when they began."""

import json
import os
from pathlib import Path

import pytest

from finetune.runs.run_checkpoint import run_of
from finetune.runs.run_search import find_runs, is_run_folder, now, runs_of, start_time


def write(folder: Path, began: str = "", **about: object) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    (folder / "about.json").write_text(json.dumps({"finetune": "0.1.0", "began": began, **about}))
    return folder


def test_named_runs_stand_between_numbered_ones_by_time(tmp_path):
    write(tmp_path / "fit/version_2", "2026-03-01T10:00:00+00:00")
    write(tmp_path / "fit/version_10", "2026-01-01T10:00:00+00:00")  # the number counts
    write(tmp_path / "fit/old", "2026-02-01T10:00:00+00:00")
    write(tmp_path / "fit/new", "2026-04-01T12:00:00+02:00")
    (tmp_path / "fit/.hidden").mkdir()
    (tmp_path / "fit/notes").mkdir()  # no run has begun there
    names = [run.name for run in runs_of(tmp_path)]
    assert names == ["old", "version_2", "version_10", "new"]
    assert runs_of(tmp_path / "nowhere") == []


def test_a_copy_of_a_run_does_not_count_as_newer(tmp_path):
    for name in ("version_0", "version_0 copy"):
        write(tmp_path / "fit" / name, "2026-03-01T10:00:00+00:00")
    assert [run.name for run in runs_of(tmp_path)] == ["version_0 copy", "version_0"]


def test_a_run_without_its_date_began_with_its_oldest_file(tmp_path):
    run = write(tmp_path / "run")
    for name, seconds in (("about.json", 2000), ("config.yaml", 1000), ("checkpoints", 3000)):
        os.utime(run / name, (seconds, seconds))
    assert start_time(run) == 1000
    write(tmp_path / "other", now())
    assert start_time(tmp_path / "other") == pytest.approx(
        os.stat(tmp_path / "other").st_mtime, abs=60
    )


def test_runs_are_found_beneath_any_folder_but_not_through_links(tmp_path):
    first = write(tmp_path / "runs/fit/version_0")
    named = write(tmp_path / "runs/fit/mine")
    demo = write(tmp_path / "runs/demo/source/fit/version_0")
    moved = write(tmp_path / "kept/good")
    (tmp_path / "runs/predict/version_0").mkdir(parents=True)
    (tmp_path / "runs/predict/version_0/config.yaml").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert find_runs(tmp_path) == sorted([first, named, demo, moved])
    assert find_runs(tmp_path / "runs/fit") == sorted([first, named])
    assert find_runs(first) == [first]
    assert find_runs(tmp_path / "nowhere") == []


def test_what_is_the_folder_of_a_run(tmp_path):
    assert is_run_folder(write(tmp_path / "anywhere"))
    assert not is_run_folder(tmp_path)
    assert not is_run_folder(tmp_path / "nowhere")
    (tmp_path / "project/checkpoints").mkdir(parents=True)  # of somebody's own project
    (tmp_path / "project/config.yaml").write_text("{}")
    assert not is_run_folder(tmp_path / "project")
    (tmp_path / "fit/version_0/checkpoints").mkdir(parents=True)  # of another tool
    (tmp_path / "fit/version_0/checkpoints/last.ckpt").touch()
    (tmp_path / "fit/version_0/about.json").write_text('{"began": "today"}')
    assert not is_run_folder(tmp_path / "fit/version_0")


def test_a_named_run_is_taken_for_a_run_before_it_has_a_checkpoint(tmp_path):
    run = write(tmp_path / "fit/mine")
    (run / "checkpoints").rmdir()
    assert run_of(str(run)) == str(run)
    (run / "about.json").unlink()
    assert run_of(str(run)) == ""
