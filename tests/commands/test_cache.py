"""The list of what is kept, and its removal: what is ours, and nothing else."""

import os
import time

import pytest

from finetune.data import image_cache
from finetune.data.datasets.folders import scan
from finetune.data.image_cache import cached_readers
from finetune.data.readers import FileReader


def test_list_and_remove(colours, cli, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(image_cache, "_MIN_SAVED", 0)
    folder = tmp_path / "caches"
    monkeypatch.setenv("FINETUNE_CACHE", str(folder))
    cli("cache")
    assert f"no caches in {folder}" in " ".join(capsys.readouterr().out.split())
    paths = scan(colours)[1]["test"].paths
    for shorter_side in (None, 30):
        cached_readers({"train": FileReader(paths, shorter_side)}, colours, 1, build=True)
    (folder / "other.txt").write_text("not ours")
    (folder / ".x.pictures.1234.tmp").write_text("half a cache")
    (folder / ".x.features.1234-0.tmp").write_text("half a cache")
    (folder / "kept.features").write_text("some")
    (folder / ".hidden-1234.features").write_text("of a folder whose name begins with a dot")
    (folder / "kept.activations").write_text("what an earlier version called them")
    (folder / ".x.activations.1234-0.tmp").write_text("half a cache")
    first, second = (path.stem for path in sorted(folder.glob("*.pictures")))
    os.utime(folder / f"{first}.pictures", (0, time.mktime((2020, 2, 3, 4, 5, 0, 0, 0, -1))))
    os.truncate(folder / f"{second}.pictures", 1000)
    cli("cache")
    shown = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    rows = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in shown if len(row) > 2}
    assert rows[first] == [f"30 pictures of {colours}", "0.00 GB", "2020-02-03 04:05"]
    assert rows[second][0] == "damaged pictures" and rows["kept"][0] == rows["kept.activations"][0] == "features"
    assert rows[".hidden-1234"][0] == "features"
    with pytest.raises(ValueError, match="there is no cache 'third'"):
        cli("cache", "--remove", "third")
    cli("cache", "--remove", first)
    assert [path.stem for path in folder.glob("*.pictures")] == [second]
    cli("cache", "--remove", "all")
    assert os.listdir(folder) == ["other.txt"]


def test_names_are_shown_as_they_are(cli, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "[bold]caches[/x]"  # a folder in a folder
    folder.mkdir(parents=True)
    monkeypatch.setenv("FINETUNE_CACHE", str(folder))
    cli("cache")
    assert f"no caches in {folder}" in " ".join(capsys.readouterr().out.split())
    (folder / "pics[old]:smile:.features").touch()
    cli("cache")
    shown = "".join(capsys.readouterr().out.split())  # the title has the table's width
    assert "pics[old]:smile:" in shown and f"cachesin{folder}" in shown
    cli("cache", "--remove", "pics[old]:smile:")
    assert os.listdir(folder) == []
