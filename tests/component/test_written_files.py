"""Files are the old or the new one, complete, whatever happens; only one process at a time makes them.

Links and modes: test_predictions.py and test_export_parts.py; checkpoints: test_checkpoint_files.py.
"""

import errno
import fcntl
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from finetune.system.files import (
    check_target,
    link,
    one_at_a_time,
    replace_text,
    replacing,
    unfinished,
    unfinished_matching,
)
from finetune.system.messages import WrongUsage

FORK = multiprocessing.get_context("fork")


def test_out_is_a_new_or_an_old_file_or_a_link_to_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "old.csv").touch()
    (tmp_path / "link").symlink_to(tmp_path / "old.csv")
    (tmp_path / "wrong").symlink_to(tmp_path / "old.csv/new.csv")
    for name in ("new.csv", "a/b/new.csv", "old.csv", "link"):
        check_target(tmp_path / name, "--out")
    assert len(os.listdir(tmp_path)) == 4  # nothing was made
    for path in (tmp_path / "pipe", "/dev/null", "/dev/stdout", tmp_path, tmp_path / "wrong"):
        with pytest.raises(WrongUsage, match=f"--out {path}"):
            check_target(path, "--out")


def test_out_in_a_folder_without_the_right_to_write(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    child = os.fork()
    if child == 0:  # root may write anywhere, so that another user has to try
        code = 1
        try:
            if os.getuid() == 0:
                for parent in (*tmp_path.parents[:3], tmp_path, folder):
                    parent.chmod(0o755)
                os.setuid(65534)
            check_target(folder / "new.csv", "--out")
        except PermissionError as error:
            code = 0 if f"--out {folder}" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path, error):
    target = tmp_path / "a.csv"
    replace_text(target, "größe: 1\n")
    with replacing(target) as path:
        path.write_text("new")
        assert target.read_text("utf-8") == "größe: 1\n"
    with pytest.raises(type(error)) as raised, replacing(target) as path:
        path.write_text("half")
        raise error
    assert target.read_text() == "new" and os.listdir(tmp_path) == ["a.csv"]
    assert getattr(raised.value, "filename", str(target)) == str(target)


def replace(target: Path, text: str) -> None:
    with replacing(target) as temporary:
        temporary.write_text(text)
        assert not target.exists() or stat.S_IMODE(temporary.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o666])
def test_a_file_keeps_mode_and_owner_and_is_private_while_it_is_written(tmp_path, mode):
    path = tmp_path / "private.csv"
    path.write_text("old")
    path.chmod(mode)
    if os.getuid() == 0:
        os.chown(path, 1234, 1234)
    before = path.stat()
    replace(path, "new")
    after = path.stat()
    assert path.read_text() == "new" and after.st_ino != before.st_ino
    assert [after.st_mode, after.st_uid, after.st_gid] == [
        before.st_mode,
        before.st_uid,
        before.st_gid,
    ]
    # the control: a new file has the mode that the umask leaves
    replace(tmp_path / "new.csv", "new")
    (tmp_path / "usual").touch()
    assert (tmp_path / "new.csv").stat().st_mode == (tmp_path / "usual").stat().st_mode != 0o100600


@pytest.mark.parametrize("name", ["a", "a**b", "[x]", "a?"])
def test_what_a_killed_process_left_is_found_whatever_the_name_and_behind_a_link(tmp_path, name):
    for left in (name, "x"):
        (tmp_path / f".{left}.0a1b2c3d.tmp").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link").symlink_to(tmp_path / name)
    for target in (tmp_path / name, tmp_path / "elsewhere/link"):
        assert unfinished(target) == [tmp_path / f".{name}.0a1b2c3d.tmp"]
    assert len(unfinished_matching(tmp_path, "*")) == 2


@pytest.mark.parametrize("can_link", [True, False])
def test_a_link_to_a_checkpoint_is_a_copy_where_there_are_no_links(tmp_path, monkeypatch, can_link):
    source, target = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    (tmp_path / ".best.ckpt.0123abcd.tmp").write_bytes(b"of a process that was killed")
    if not can_link:

        def refuse(*_) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):  # the second time as after an epoch that wrote nothing new
        link(source, target)
        assert target.read_bytes() == b"new" and os.path.samefile(source, target) == can_link
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt"]


def count_up(folder: Path) -> None:
    for _ in range(50):
        with one_at_a_time(folder / "x"):
            number = int((folder / "count").read_text())
            (folder / "count").write_text(str(number + 1))


def test_one_process_at_a_time_makes_a_file(tmp_path):
    (tmp_path / "count").write_text("0")
    processes = [FORK.Process(target=count_up, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "count").read_text() == "200" and os.listdir(tmp_path) == ["count"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_needs_none(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with one_at_a_time(tmp_path / "x"):
        pass
    assert os.listdir(tmp_path) == []
