"""What is read back of a run's folder."""

import numpy as np
import pytest
from run_folders import write_run

from finetune.runs.record import read_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "name" / "fit" / "version_3", [0, 1], np.eye(2), ["a", "b"])


def test_what_is_there(run):
    record = read_run(run)
    assert record.name == "name/fit/version_3" and record.setting("data", "init_args", "image_size") == 32
    assert record.setting("data", "nothing", "here") is None
    assert record.line("val/loss") == ([1, 2, 3], [0.9, 0.6, 0.7])
    assert record.line("lr-SGD/head", "step") == ([3, 7, 11], [0.1, 0.05, 0.01])
    assert record.names("lr-") == ["lr-SGD/head"]
    assert record.answers is not None and record.answers.unread == ["broken.png"]


def test_what_is_not_there_is_empty(run):
    for path in run.iterdir():
        if path.name != "config.yaml":
            path.unlink()
    record = read_run(run)
    assert record.about == record.result == record.seconds == {} and record.metrics == record.skipped == []
    assert record.answers is None and record.best is None and record.line("val/loss") == ([], [])


@pytest.mark.parametrize(("name", "content"), [("test.json", "[1]"), ("about.json", "{"), ("config.yaml", "a: [")])
def test_damaged_files_are_named(run, name, content):
    (run / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        read_run(run)


def test_another_folder_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not the folder of a run: it has no config\.yaml"):
        read_run(tmp_path)
