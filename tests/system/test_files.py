"""Files are the old or the new one, complete, whatever happens; only one process at a time makes them."""

import errno
import fcntl
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from finetune.system.files import (
    check_target,
    create_part,
    link,
    one_at_a_time,
    put_in_place,
    replace_text,
    replacing,
    unfinished,
    unfinished_matching,
)
from finetune.system.messages import WrongUsage


def test_a_target_in_a_folder_that_is_there_or_will_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in ("new.csv", "a/b/new.csv", tmp_path / "new.csv"):
        check_target(target, "--output")
    Path("old.csv").touch()
    check_target("old.csv", "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]  # looked at, nothing made


def test_what_is_no_file_is_not_taken_the_place_of(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null", "/dev/stdout"):
        with pytest.raises(WrongUsage, match=f"--output {path}"):
            check_target(path, "--output")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    check_target(tmp_path / "link", "--output")  # the control


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
            code = (
                0
                if str(error) == f"--output {folder}/new.csv: no right to write in {folder}"
                else 2
            )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_target(tmp_path / "new.csv", "--output")


def test_a_link_stays_and_leads_to_what_was_written(tmp_path):
    (tmp_path / "disk").mkdir()
    for name in ("old.csv", "new.csv"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    (tmp_path / "disk/old.csv").write_text("old")
    for name in ("old.csv", "new.csv"):
        replace_text(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink() and (tmp_path / "disk" / name).read_text() == "new"
    assert len(list(tmp_path.rglob("*"))) == 5
    (tmp_path / "lost.csv").symlink_to(tmp_path / "old.csv/new.csv")
    with pytest.raises(WrongUsage, match=r"old\.csv is a file"):
        check_target(tmp_path / "lost.csv", "--output")


def write_part(target: Path, text: str) -> None:
    part = target.with_name("part")
    create_part(part, target)
    part.write_text(text)
    put_in_place(part, target)


@pytest.mark.parametrize("write", [replace_text, write_part])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_a_file_keeps_its_mode_and_its_owner(tmp_path, write, mode):
    path = tmp_path / "private.csv"
    path.write_text("old")
    path.chmod(mode)
    if os.getuid() == 0:
        os.chown(path, 1234, 1234)
    before = path.stat()
    write(path, "new")
    after = path.stat()
    assert path.read_text() == "new" and after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    write(tmp_path / "new.csv", "new")  # the control: a new file has the mode that the umask leaves
    (tmp_path / "usual").touch()
    assert (tmp_path / "new.csv").stat().st_mode == (tmp_path / "usual").stat().st_mode != 0o100600


def test_nobody_else_reads_a_private_file_while_it_is_written(tmp_path):
    path = tmp_path / "private.csv"
    path.touch(0o600)
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    create_part(tmp_path / "part", path)
    assert stat.S_IMODE((tmp_path / "part").stat().st_mode) == 0o600


def test_what_a_killed_process_left_is_found_where_a_link_leads(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "disk/real.csv")
    left = tmp_path / "disk/.real.csv.0a1b2c3d.tmp"
    left.touch()
    assert unfinished(tmp_path / "link.csv") == [left]


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


def test_text_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    replace_text(path, "größe: 1\n")
    replace_text(path, "größe: 2\n")
    assert path.read_bytes() == "größe: 2\n".encode()
    write = Path.write_text

    def full(self: Path, text: str, **options) -> int:
        write(self, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space") as reported:
        replace_text(path, "größe: 3\n")
    assert reported.value.filename == str(path)
    assert os.listdir(tmp_path) == ["config.yaml"] and path.read_bytes() == "größe: 2\n".encode()


@pytest.mark.parametrize("can_link", [True, False])
def test_linked_is_the_same_whatever_was_there(tmp_path, monkeypatch, can_link):
    source, target = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    (tmp_path / ".best.ckpt.0123abcd.tmp").write_bytes(b"of a process that was killed")
    if not can_link:

        def refuse(*_) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    link(source, target)
    assert target.read_bytes() == b"new" and os.path.samefile(source, target) == can_link
    link(source, target)  # again, as after an epoch that wrote nothing new
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt"]


def test_a_wait_for_another_process_is_reported(tmp_path):
    with one_at_a_time(tmp_path / "x") as has_waited:
        assert not has_waited
        code = "from pathlib import Path; from finetune.system.files import one_at_a_time as o\n"
        code += "print('up', flush=True)\n"
        code += f"with o(Path({str(tmp_path / 'x')!r})) as w: print(w)"
        process = subprocess.Popen(
            [os.sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "up\n"
        time.sleep(0.5)
    assert process.communicate(timeout=60)[0] == "True\n"


def test_a_lock_goes_while_it_is_held(tmp_path, monkeypatch):
    """After the release, the file may be the lock of another process."""
    unlink, held = Path.unlink, []

    def watched(self, missing_ok=False):
        if self.name.endswith(".lock"):
            try:
                FileLock(self).acquire(timeout=0).lock.release()
                held.append(False)
            except Timeout:
                held.append(True)
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    with one_at_a_time(tmp_path / "x"):
        pass
    assert held == [True] and not list(tmp_path.iterdir())


def test_a_lock_that_is_released_between_two_looks_is_acquired(tmp_path, monkeypatch):
    """Another process deletes the lock file after this one has found it locked."""
    acquire, refusals = FileLock.acquire, iter([True])

    def refused_once(lock, timeout=-1):
        if next(refusals, False):
            assert not Path(lock.lock_file).exists()  # the other process has released it by now
            raise Timeout(lock.lock_file)
        return acquire(lock, timeout=timeout)

    monkeypatch.setattr(FileLock, "acquire", refused_once)
    with one_at_a_time(tmp_path / "x") as has_waited:
        assert has_waited and [*tmp_path.iterdir()] == [tmp_path / ".x.lock"]
    assert not list(tmp_path.iterdir())


def test_two_that_write_one_file_at_once_each_write_it_whole(tmp_path, monkeypatch):
    target = tmp_path / "x"
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers
    with replacing(target) as first, replacing(target) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second
    assert target.read_text() == "first" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["a", "a**b", "[x]", "a?"])
def test_what_a_killed_process_left_is_found_whatever_the_name(tmp_path, name):
    for left in (name, "x"):
        (tmp_path / f".{left}.0a1b2c3d.tmp").touch()
    assert unfinished(tmp_path / name) == [tmp_path / f".{name}.0a1b2c3d.tmp"]
    assert {*unfinished_matching(tmp_path, "*")} == {*tmp_path.iterdir()}


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_needs_none(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with one_at_a_time(tmp_path / "x") as has_waited:
        assert not has_waited
    assert [*tmp_path.iterdir()] == []
    # as in versions of filelock that take each error for a lock of another process
    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout=-1: time_out(lock, timeout))
    with one_at_a_time(tmp_path / "x") as has_waited:
        assert not has_waited
    code = errno.EIO  # the control
    monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="put/output"), one_at_a_time(tmp_path / "x"):
        pass


def time_out(lock: FileLock, timeout: float) -> None:
    assert timeout == 0, "it would wait forever"
    Path(lock.lock_file).touch()
    raise Timeout(lock.lock_file)
