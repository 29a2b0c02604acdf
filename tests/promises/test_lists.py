"""`finetune runs`, `finetune backbones` and `finetune cache`: their tables, and what `rm` and `--remove` leave."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from object_server import object_server
from promise import promise
from rich.console import Console
from run_folders import write_run

from finetune import ImageFolderData
from finetune.commands import runs as runs_module
from finetune.data.image_cache import read_from_cache
from finetune.data.image_files import open_file
from finetune.data.local_folders import local_folder
from finetune.models import backbones


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """The folder of a run with a result."""
    ended = "2026-01-01T10:00:00+00:00"
    answers = np.eye(3)[[0, 1, 2, 1]]
    run = write_run(tmp_path / "runs/fit/version_0", [0, 1, 2, 0], answers, ended=ended)
    (run / "checkpoints").mkdir()
    (run / "checkpoints/best.ckpt").write_bytes(b"x" * 2_000_000)
    return run


@promise("runs")
def test_runs_shows_a_table_and_json(listed, cli, capsys, tmp_path):
    cli("runs")
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["when", "data", "network", "epochs"]
    assert "resnet18" in row and "test  75.0 % (30.1–95.4 %)" in row
    assert "2.0 MB" in row and "finished" in row and "runs/fit/version_0" in row
    cli("runs", tmp_path / "runs", "--json", "--sort", "accuracy")
    (plain,) = json.loads(capsys.readouterr().out)
    assert plain["accuracy"] == 0.75 and plain["folder"] == str(listed)
    (listed / "run.json").write_text("{")
    cli("runs")
    assert "run.json is damaged" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    cli("runs", tmp_path / "empty")
    assert capsys.readouterr().out == f"no runs in {tmp_path}/empty\n"


@pytest.mark.parametrize("width", [80, 130])
def test_runs_on_a_narrow_terminal_shows_complete_folders(listed, cli, capsys, monkeypatch, width):
    monkeypatch.setattr(runs_module, "table_console", lambda _: Console(width=width))
    cli("runs")
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("when"))
    place = lines[header].index("folder")
    assert "".join(line[place:].strip() for line in lines[header + 1 :]) == "runs/fit/version_0"


@promise("runs-rm")
def test_runs_rm_deletes_a_run_and_keeps_files_of_the_user(run, cli, capsys):
    whole, kept = run(), run("frozen", "runs/fit/version_1")
    (kept / "notes.txt").write_text("mine")
    cli("runs", "rm", "--yes", whole, kept, f"{kept}/")
    assert f"kept {kept}/notes.txt" in capsys.readouterr().out
    assert not whole.exists() and [path.name for path in kept.rglob("*")] == ["notes.txt"]


@promise("backbones")
def test_backbones_lists_networks_with_size_and_licence(cli, capsys, monkeypatch):
    monkeypatch.setattr(backbones, "is_local", lambda name: name == "resnet18")
    cli("backbones", "resnet18*")
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("resnet18 "))
    size = ["resnet18", "11.7", "M", "224", "px", "yes"]
    assert row.split() == [*size, "BSD-3-Clause", "code;", "ImageNet's", "terms"]
    assert "timm/resnet18.tv_in1k" in shown
    cli("backbones")
    assert "regnet_y_16gf" in capsys.readouterr().out
    cli("backbones", "--local")
    header, row = capsys.readouterr().out.splitlines()
    assert header.startswith("network") and row.startswith("resnet18 ")
    cli("backbones", "*VIT*", "--json")
    found = [network["name"] for network in json.loads(capsys.readouterr().out)]
    assert {"vit_b_16", "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"} <= {*found}
    assert all("vit" in name for name in found)


def test_cache_lists_caches_and_remove_leaves_other_files(
    cli: Callable[..., None], colours, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "[bold]caches[/x]"  # a folder in a folder, and no markup
    folder.mkdir(parents=True)
    monkeypatch.setenv("FINETUNE_CACHE", str(folder))
    cli("cache")
    assert f"no caches in {folder}" in " ".join(capsys.readouterr().out.split())
    (folder / "my.images").write_text("of the user")
    (folder / "notes.txt").touch()
    images = ImageFolderData(str(colours), image_size=28)
    for root in (colours, colours.parent):
        assert read_from_cache(images.splits, root, 1, build=True)
    (damaged,) = folder.glob(f"{colours.parent.name}-*.images")
    os.truncate(damaged, 1000)
    cli("cache")
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == f"caches in {folder}" and "damaged images" in "".join(rows)
    assert f"60 images of {colours}" in "".join(rows) and len(rows) == 3  # with a heading
    cli("cache", "--remove", "all")
    assert sorted(os.listdir(folder)) == ["my.images", "notes.txt"]


def test_cache_lists_and_removes_copies_of_images_in_object_storage(
    colours, cli, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "caches"))
    with object_server() as server:
        place = server.put_folder(colours / "test", "set")
        for name in ("00.png", "01.png"):
            open_file(f"{local_folder(place)}/red/{name}").close()
    archive = shutil.make_archive(str(tmp_path / "holiday"), "zip", colours)
    local_folder(archive)
    mine = tmp_path / "caches/copies-of-images/mine/photo.png"
    mine.parent.mkdir()
    mine.touch()
    cli("cache")
    listed = capsys.readouterr().out
    assert "copies of s3-photos" in listed and "copies of holiday.zip" in listed
    cli("cache", "--remove", "all")
    assert "removed 2 from" in capsys.readouterr().out and mine.exists()
    cli("cache")
    assert "no caches" in capsys.readouterr().out
