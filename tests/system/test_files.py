"""Files that a command writes at its end."""

import os
import stat
from pathlib import Path

import pytest

from finetune.system.files import check_target, replacing
from finetune.system.messages import WrongUsage


def test_a_target_in_a_folder_that_is_there_or_will_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in ("new.csv", "a/b/new.csv", tmp_path / "new.csv"):
        check_target(target, "--output")
    Path("old.csv").touch()
    check_target("old.csv", "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]  # looked at, nothing made
    with pytest.raises(WrongUsage, match="is a folder: name a file in it"):
        check_target(tmp_path, "--output")
    with pytest.raises(WrongUsage, match=f"{tmp_path}/old.csv is a file, not a folder"):
        check_target("old.csv/a/new.csv", "--output")


def test_no_right_to_write(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    child = os.fork()
    if child == 0:  # root may write anywhere, so that another user has to try
        code = 1
        try:
            for parent in reversed(tmp_path.parents[:3]):
                if os.getuid() == 0:
                    parent.chmod(0o755)
            if os.getuid() == 0:
                tmp_path.chmod(0o755)
                folder.chmod(0o555)
                os.setuid(65534)
            check_target(folder / "new.csv", "--output")
        except PermissionError as error:
            code = 0 if str(error) == f"--output {folder}/new.csv: no right to write in {folder}" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_target(tmp_path / "new.csv", "--output")


def test_replaced_at_once_or_not_at_all(tmp_path):
    target = tmp_path / "a.png"
    target.write_text("old")
    with replacing(target) as path:
        assert path.parent == tmp_path
        path.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    with pytest.raises(KeyboardInterrupt), replacing(target) as path:
        path.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
