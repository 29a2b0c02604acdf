"""Where caches lie and what decides about their names; the command is tested in test_cache.py, on real caches."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from finetune.system.cache_dir import cache_dir, files_digest, mark_used, room


def test_own_variable_comes_before_the_folder_of_all_caches_and_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FINETUNE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache/finetune"
    monkeypatch.setenv("XDG_CACHE_HOME", "/all")
    assert cache_dir() == Path("/all/finetune")
    monkeypatch.setenv("FINETUNE_CACHE", "/own")
    assert cache_dir() == Path("/own")


def test_half_of_what_is_free_may_be_taken_also_where_the_folder_is_not_made_yet(tmp_path):
    asked = []

    def usage(folder):
        asked.append(folder)
        return SimpleNamespace(free=1000)

    with patch("shutil.disk_usage", usage):
        assert room(tmp_path / "not/yet") == 500
    assert asked == [tmp_path]


@pytest.fixture
def digest(tmp_path) -> Callable[..., str]:
    """The digest of files of three bytes in a folder `one`, or of others."""
    (tmp_path / "one").mkdir()
    for name in "ab":
        (tmp_path / "one" / name).write_bytes(b"123")
        os.utime(tmp_path / "one" / name, (5, 5))
    return lambda names="ab", root="one": files_digest(
        [str(tmp_path / root / n) for n in names], tmp_path / root
    )


def test_name_size_time_and_order_of_the_files_make_the_digest_and_their_folder_does_not(
    tmp_path, digest
):
    first = digest()
    found = {first, digest("ba"), digest("a"), digest("ac")}  # c is not there
    os.rename(tmp_path / "one", tmp_path / "two")
    assert digest(root="two") == first
    os.utime(tmp_path / "two/a", (5, 6))
    found.add(digest(root="two"))
    (tmp_path / "two/a").write_bytes(b"1234")
    os.utime(tmp_path / "two/a", (5, 5))
    found.add(digest(root="two"))
    assert len(found) == 6


@pytest.mark.parametrize("how", ["written over", "put in its place", "swapped"])
def test_a_file_replaced_by_one_of_its_size_and_time_is_noticed(tmp_path, digest, how):
    first, other = digest(), tmp_path / "one/b"
    path = tmp_path / "one/a"
    time.sleep(0.02)  # the file system's clock ticks a hundred times a second or more
    if how == "swapped":
        os.rename(path, tmp_path / "c")
        os.rename(other, path)
        os.rename(tmp_path / "c", other)
    else:
        target = path if how == "written over" else tmp_path / "new"
        target.write_bytes(b"456")
        os.utime(target, (5, 5))
        os.replace(target, path)
    assert (path.stat().st_size, path.stat().st_mtime) == (3, 5)  # the control: these say nothing
    assert digest() != first


def test_to_read_a_file_changes_nothing(tmp_path, digest):
    first = digest()
    time.sleep(0.02)
    (tmp_path / "one/a").read_bytes()
    list((tmp_path / "one").iterdir())
    (tmp_path / "one/c").touch()  # beside them
    assert digest() == first


def test_use_is_noted_where_that_is_allowed(tmp_path):
    path = tmp_path / "x"
    path.touch()
    os.utime(path, (0, 0))
    mark_used(path)
    assert time.time() - path.stat().st_mtime < 100
    mark_used(tmp_path / "gone")
