"""Where caches are, and what decides their names; test_cache.py tests the command on real caches."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from finetune.system.cache_dir import available_bytes, cache_dir, mark_used


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
        assert available_bytes(tmp_path / "not/yet") == 500
    assert asked == [tmp_path]


def test_use_is_noted_where_that_is_allowed(tmp_path):
    path = tmp_path / "x"
    path.touch()
    os.utime(path, (0, 0))
    mark_used(path)
    assert time.time() - path.stat().st_mtime < 100
    mark_used(tmp_path / "gone")
