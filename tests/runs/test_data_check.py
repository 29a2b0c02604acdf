"""Which check.json belongs to the images of a run, and which does not."""

import json

import numpy as np
import pytest
from run_folders import NAMES, write_run

from finetune.runs.data_check import data_check
from finetune.runs.record import read_run
from finetune.system.messages import WrongUsage


@pytest.fixture
def begun(tmp_path):
    """A run that was started in tmp_path, on eight images of each of three classes in tmp_path/photos."""
    p = np.eye(3)[[0, 1, 2]] * 0.9 + 0.03
    return write_run(
        tmp_path / "run", [0, 1, 2], p / p.sum(axis=1, keepdims=True), folder=str(tmp_path)
    )


def write_check(folder, root, counts=(8, 8, 8), **changes):
    """A check.json of the classes in another order than the run's; the sum over its splits is `counts`."""
    order = sorted(range(3), key=lambda c: NAMES[c], reverse=True)
    split = {"train": [counts[c] - 2 for c in order], "test": [2, 2, 2]}
    finding = {
        "kind": "blank",
        "level": "warning",
        "title": "1 image",
        "advice": "",
        "is_judged": True,
    }
    finding["rows"] = [{"files": ["a.jpg"], "note": "", "value": 1.0}]
    content = {
        "root": str(root),
        "date": "2026-01-02 03:04",
        "network": "",
        "num_pictures": sum(counts),
    }
    content |= {
        "classes": [NAMES[c] for c in order],
        "counts": split,
        "findings": [finding],
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "check.json").write_text(json.dumps(content))
    return folder / "check.json"


def test_it_is_found_where_the_run_was_begun(begun, tmp_path, monkeypatch):
    assert data_check(read_run(begun)) is None
    path = write_check(tmp_path, tmp_path / "photos")
    monkeypatch.chdir("/")
    check = data_check(read_run(begun))
    assert (check.path, check.num_images, check.doubt) == (path, 24, "") and check.findings[0][
        "kind"
    ] == "blank"
    assert check.page == tmp_path / "check.html"


@pytest.mark.parametrize("content", ["", "[]", '{"findings": 3}', "\x00"])
def test_what_is_no_check_is_an_error_only_where_it_is_named(begun, tmp_path, content):
    path = write_check(tmp_path, tmp_path / "photos")
    assert data_check(read_run(begun)) is not None  # the control
    path.write_text(content)
    assert data_check(read_run(begun)) is None
    with pytest.raises(WrongUsage, match="is not a check.json of this version of `finetune check`"):
        data_check(read_run(begun), str(path))


def test_a_check_of_another_folder_is_refused_and_never_taken(begun, tmp_path):
    path = write_check(tmp_path, tmp_path / "others", (8, 8, 9))
    assert data_check(read_run(begun)) is None
    with pytest.raises(
        WrongUsage, match=r"is of .*others, the run has read .*photos: check that folder"
    ):
        data_check(read_run(begun), str(path))


def test_the_same_images_may_have_lain_elsewhere(begun, tmp_path):
    path = write_check(tmp_path / "out", "/mnt/photos")
    assert "It was in /mnt/photos then" in data_check(read_run(begun), str(path)).doubt


def test_other_numbers_in_the_same_folder_are_reported(begun, tmp_path):
    write_check(tmp_path, tmp_path / "photos", (8, 8, 7))
    assert "found 23 images there, and this run has read 24" in data_check(read_run(begun)).doubt


def test_a_folder_is_taken_for_the_file_in_it_and_a_missing_one_is_reported(begun, tmp_path):
    write_check(tmp_path / "out", tmp_path / "photos")
    assert data_check(read_run(begun), str(tmp_path / "out")).num_images == 24
    with pytest.raises(WrongUsage, match=r"--check: no file .*nothing"):
        data_check(read_run(begun), str(tmp_path / "nothing"))


def test_a_run_that_does_not_say_what_it_has_read_takes_none(begun, tmp_path):
    path = write_check(tmp_path, tmp_path / "photos")
    (begun / "about.json").unlink()
    assert data_check(read_run(begun)) is None
    with pytest.raises(WrongUsage, match=r"run has no about\.json"):
        data_check(read_run(begun), str(path))
