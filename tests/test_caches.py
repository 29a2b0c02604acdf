"""Where caches lie and what decides about their names; the command is tested in test_cache.py, on real caches."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from finetune.caches import cache_dir, files_digest, mark_used, room


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


def test_name_size_time_and_order_of_the_files_make_the_digest_and_their_folder_does_not(tmp_path):
    for root in ("one", "two"):
        for name in "ab":
            path = tmp_path / root / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"123")
            os.utime(path, (5, 5))

    def digest(root: str, names: str = "ab") -> str:
        return files_digest([str(tmp_path / root / name) for name in names], tmp_path / root)

    first = digest("one")
    assert first == digest("two")
    found = {first, digest("one", "ba"), digest("one", "a"), digest("one", "ac")}  # c is not there
    os.utime(tmp_path / "two/a", (5, 6))
    found.add(digest("two"))
    (tmp_path / "one/a").write_bytes(b"1234")
    os.utime(tmp_path / "one/a", (5, 5))
    found.add(digest("one"))
    assert len(found) == 6


def test_use_is_noted_where_that_is_allowed(tmp_path):
    path = tmp_path / "x"
    path.touch()
    os.utime(path, (0, 0))
    mark_used(path)
    assert time.time() - path.stat().st_mtime < 100
    mark_used(tmp_path / "gone")
