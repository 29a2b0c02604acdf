"""A fit on an archive of images: the weights are those of the folder in it, and other commands take it, too."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from colours import QUICKEST
from fitted_weights import are_equal, error_line, fit
from object_server import ObjectServer, begin_test, object_server
from promise import control, promise

from finetune.commands.command_line import in_full_spelling
from finetune.review.review_images import list_images


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    yield from begin_test(running, monkeypatch)


def write_tar(folder: Path) -> Path:
    with tarfile.open("photos.tar.gz", "w:gz") as archive:
        archive.add(folder, "photos")
    return Path("photos.tar.gz")


@promise("archives")
@control("archives")
def test_weights_are_those_of_the_folder(server, colours, cli, capsys):
    local = fit(cli, colours, "local")
    path = write_tar(colours)
    assert are_equal(local, fit(cli, path, "archive"))
    server.put("x/photos.tar.gz", path.read_bytes())
    assert are_equal(local, fit(cli, f"{server.address}/x/photos.tar.gz", "there"))
    assert server.requests["GET"] == 1 and server.requests["LIST"] == 0
    write_tar(colours)  # another version, in another folder of the cache
    assert not are_equal(local, fit(cli, path, "other", "--seed", 1))  # the control
    for run in ("local", "other", "there"):
        capsys.readouterr()
        cli("compare", "runs/fit/archive", f"runs/fit/{run}")
        assert "alone is correct on" in capsys.readouterr().out
    text = error_line(cli, "test", "runs/fit/there")
    assert "a checkpoint may not choose an address" in text


def test_other_commands_take_it(server, colours, cli, capsys):
    path = write_tar(colours)
    server.put("x/photos.tar.gz", path.read_bytes())
    fit(cli, path, "run", "--test_after_fit", "false")
    tested = []
    for place in (colours, path, f"{server.address}/x/photos.tar.gz"):
        capsys.readouterr()
        cli("test", "runs/fit/run", place)
        tested.append([line for line in capsys.readouterr().out.splitlines() if "acc" in line])
        cli("predict", "runs/fit/run", place, "--out", "predicted.csv")
        assert len(Path("predicted.csv").read_text().splitlines()) == 1 + num_images(colours)
        assert list_images(str(place)).names == list_images(colours).names
        assert in_full_spelling(["review", str(place)])[-1] == str(place)
        with pytest.raises(SystemExit):
            cli("check", place, "--out", "checked")
    assert tested[0] == tested[1] == tested[2] != []
    cli("validate", "runs/fit/run", path)
    assert "photos.rar' is a file" in error_line(cli, "fit", rar(), *QUICKEST)
    assert "does not exist" in error_line(cli, "fit", f"{server.address}/none.tar", *QUICKEST)


def num_images(folder: Path) -> int:
    return len([*folder.rglob("*.png")])


def rar() -> str:
    Path("photos.rar").write_bytes(b"")
    return "photos.rar"
