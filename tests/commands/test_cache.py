"""`finetune cache` lists our caches, and removes nothing else."""

import os
import re
import time
from dataclasses import replace

from finetune.data import image_cache
from finetune.data.datasets.folders import scan
from finetune.data.image_cache import read_from_cache
from finetune.system.cache_dir import MARK
from finetune.system.messages import bytes_text


def test_list_and_remove(colours, cli, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(image_cache, "_MIN_SAVED", 0)
    folder = tmp_path / "caches"
    monkeypatch.setenv("FINETUNE_CACHE", str(folder))
    cli("cache")
    assert f"no caches in {folder}" in " ".join(capsys.readouterr().out.split())
    samples = scan(colours)[1]["test"]
    for shorter_side in (None, 30):
        reduced = replace(samples, shorter_side=shorter_side)
        read_from_cache({"train": reduced}, colours, 1, build=True)
    first, second = (path.stem for path in sorted(folder.glob("*.pictures")))
    (folder / "other.txt").write_text("not ours")
    (folder / ".x.pictures.1234abcd.tmp").write_bytes(MARK + b"half a cache")
    (folder / ".x.pictures.00000000.tmp").touch()
    users = ["my.pictures", ".my.pictures.1234abcd.tmp", "empty.pictures"]
    for name in users:
        (folder / name).write_text("" if name.startswith("empty") else "of the user")
    os.utime(folder / f"{first}.pictures", (0, time.mktime((2020, 2, 3, 4, 5, 0, 0, 0, -1))))
    os.truncate(folder / f"{second}.pictures", 1000)
    first_size = (folder / f"{first}.pictures").stat().st_size
    cli("cache")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"caches in {folder}"
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    assert [f"30 images of {colours}", bytes_text(first_size), "2020-02-03 04:05"] in rows
    about = [row[0] for row in rows]
    assert "damaged images" in about and len(rows) == 4  # with two headings
    cli("cache", "--remove", "all")
    assert sorted(os.listdir(folder)) == sorted(["other.txt", *users])


def test_names_are_shown_as_they_are(cli, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "[bold]caches[/x]"  # a folder in a folder
    folder.mkdir(parents=True)
    monkeypatch.setenv("FINETUNE_CACHE", str(folder))
    cli("cache")
    assert f"no caches in {folder}" in " ".join(capsys.readouterr().out.split())
