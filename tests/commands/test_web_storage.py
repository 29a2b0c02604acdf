"""Images on a web server, which a table names: the weights are those of the same table with images on a disk."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from colours import QUICKEST
from fitted_weights import are_equal, error_line, fit
from object_server import BUCKET, ObjectServer, begin_test, object_server

from finetune.data import fetching, object_requests
from finetune.data.addresses import StorageError, parse_address
from finetune.data.contents import UNKNOWN, file_digests
from finetune.data.prediction_paths import files_to_predict
from finetune.data.storage import STORAGES, file_stats, kind_of, open_file, read_pieces, refresh
from finetune.system.messages import WrongUsage

NO_CACHE = ("--data.cache_limit_gb", 0)  # another test of this folder may have left one


@pytest.fixture(scope="module")
def running(colours: Path) -> Iterator[ObjectServer]:
    with object_server() as server:
        server.put_folder(colours, "set")
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The server with the images of `colours`, and no client yet."""
    monkeypatch.delitem(STORAGES, "http", raising=False)
    yield from begin_test(running, monkeypatch)
    STORAGES.pop("http", None)


@pytest.fixture
def place(server: ObjectServer) -> str:
    """The address of the folder of the images, to which no list belongs."""
    return f"http://127.0.0.1:{server.port}/{BUCKET}/set"


def write_table(colours: Path, prefix: str = "") -> int:
    """Write labels.csv, and return the number of images in it."""
    paths = sorted(colours.rglob("*.png"))
    rows = [
        f"{prefix}{path.relative_to(colours)},{path.parent.name},{path.parent.parent.name}"
        for path in paths
    ]
    Path("labels.csv").write_text("\n".join(["path,label,split", *rows]))
    return len(paths)


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_weights_are_those_of_the_table_on_a_disk(server, place, colours, cli, num_workers):
    options = ["--data.num_workers", num_workers, "--data.mixup", 0.2]
    num = write_table(colours)
    local = fit(cli, "labels.csv", "local", "--data.root", colours, *options)
    assert are_equal(local, fit(cli, "labels.csv", "there", "--data.root", place, *options))
    # one more, for the index of packed images
    assert server.requests["HEAD"] == num + 1 and server.requests["LIST"] == 0
    server.put("set/train/red/00.png", Path(colours, "train/red/01.png").read_bytes())
    STORAGES.pop("http")
    other = fit(cli, "labels.csv", "changed", "--data.root", place, *options)
    assert not are_equal(local, other)  # the control


@pytest.mark.slow
def test_addresses_in_a_table_lie_in_its_root(server, place, colours, cli):
    write_table(colours)
    local = fit(cli, "labels.csv", "local", "--data.root", colours)
    write_table(colours, f"{place}/")
    assert are_equal(local, fit(cli, "labels.csv", "there", "--data.root", place))
    asked: set[str] = set()
    server.fault = lambda method, path: asked.add(path) or ""
    for more in ((), ("--data.root", colours), ("--data.root", f"{place}/other")):
        text = error_line(cli, "fit", "labels.csv", *QUICKEST, *more)
        assert "is an address outside of the folder of the images" in text
    # whether the last folder is packed
    assert asked and all(path.startswith(f"/{BUCKET}/set/other") for path in asked)


@pytest.mark.slow
def test_packed_images_there(server, place, colours, cli):
    cli("pack", colours, "packed")
    server.put_folder(Path("packed"), "packed")
    local = fit(cli, "packed", "local", *NO_CACHE)
    server.requests.clear()
    assert are_equal(local, fit(cli, place.replace("/set", "/packed"), "there", *NO_CACHE))
    assert server.requests["HEAD"] < 5


def test_a_file_is_asked_for_once_and_found_by_its_encoded_name(server, place):
    names = ["a b.png", "100%.png", "c+d&e=f.png"]
    for name in names:
        server.put(f"set/{quote(name)}", name.encode())
    refresh(place)
    server.requests.clear()
    paths = [f"{place}/{quote(name)}" for name in names]
    for _ in range(2):
        sizes = file_stats([*paths, f"{place}/none.png"]).sizes
        assert sizes.tolist() == [len(name) for name in names] + [-1]
    assert server.requests["HEAD"] == len(names) + 2  # twice for the missing one
    for path, name in zip(paths, names, strict=True):
        assert open_file(path).read() == name.encode()
        assert read_pieces(path, 2, lambda size: (0, size - 1))[1] == [
            name[:2].encode(),
            name[-1:].encode(),
        ]
    assert kind_of(paths[0]) == "file" and kind_of(f"{place}/none.png") is None
    assert list(files_to_predict(paths[0])) == [paths[0]]


def test_images_on_a_server_without_range_requests(server, place, monkeypatch):
    shard = f"{place}/shard-00000.tar"
    server.put("set/shard-00000.tar", bytes(1000))
    refresh(place)
    path = f"{place}/train/red/00.png"
    places = (path, 10, lambda size: (0, size // 2, size - 3, size + 5))
    pieces = read_pieces(*places)
    digests = file_digests([path], np.arange(1))
    monkeypatch.setattr(server, "has_ranges", False)
    assert read_pieces(*places) == pieces and [len(piece) for piece in pieces[1]] == [10, 10, 3, 0]
    assert np.array_equal(file_digests([path], np.arange(1)), digests)
    # the control: a shard has the bytes of thousands of images
    with pytest.raises(StorageError, match=f"{shard}: the server sends complete files only"):
        read_pieces(shard, 10, lambda size: (20,))


def test_a_time_after_the_last_one_in_64_bits(server, place):
    name = "set/train/red/00.png"
    server.metadata[name] = {"Last-Modified": "Fri, 31 Dec 9999 23:59:59 GMT"}
    refresh(place)
    paths = [f"{place}/train/red/0{i}.png" for i in range(2)]
    times = file_stats(paths).times[:, 0].tolist()
    del server.metadata[name]
    assert times[0] == 2**63 - 1 > times[1] > 0


def test_nothing_outside_of_the_root_is_read(server, place):
    refresh(f"{place}/train")
    server.requests.clear()
    outside = f"{place}/test/red/00.png"
    assert file_stats([outside]).sizes.tolist() == [-1]
    with pytest.raises(PermissionError):
        open_file(outside)
    assert not server.requests
    assert open_file(f"{place}/train/red/00.png").read()  # the control


def test_more_missing_files_than_threads_are_asked_for(server, place):
    refresh(place)
    paths = [f"{place}/none{i}.png" for i in range(2 * fetching._NUM_THREADS)]
    assert (file_digests(paths, np.arange(len(paths))) == UNKNOWN).all()
    assert server.requests["HEAD"] > len(paths)


def test_a_replaced_image_is_named(server, place):
    path = f"{place}/train/red/00.png"
    refresh(place)
    file_stats([path])
    content = server.objects["set/train/red/00.png"]
    assert open_file(path).read() == content
    server.put("set/train/red/00.png", content[::-1])
    with pytest.raises(StorageError, match=f"{path} was replaced"):
        open_file(path)


def test_what_is_wrong_is_reported_in_one_line(server, place, colours, cli, monkeypatch):
    def line(*arguments: object) -> str:
        STORAGES.pop("http", None)
        return error_line(cli, *arguments)

    assert "a web server has no list" in line("fit", place, *QUICKEST)
    write_table(colours)
    at_root = ("fit", "labels.csv", *QUICKEST, "--data.root")
    assert "does not exist" in line(*at_root, f"{place}-none")
    server.fault = lambda method, path: "deny"
    assert "access denied" in line(*at_root, place)
    server.fault = lambda method, path: "refuse" if method == "HEAD" else ""
    assert "the server refuses HEAD requests" in line(*at_root, place)
    server.fault = lambda method, path: ""
    for name in ("index.jsonl", "shard-00000.tar"):  # the same page at each path
        server.put(f"app/{name}", b"<!doctype html>\n<html></html>\n")
    assert "is a web page, not the index" in line("fit", place.replace("/set", "/app"), *QUICKEST)
    monkeypatch.setattr(object_requests, "START_SECONDS", 0.2)
    server.fault = lambda method, path: "unavailable"
    assert "does not answer, or not as expected" in line(*at_root, place)
    for out in (("fit", colours, "--out", place), ("pack", colours, place)):
        assert "can only be read" in line(*out)


@pytest.mark.parametrize(
    "rest", ["", "/x", "user:secret@host/x", "host/x?signature=secret", "h#secret"]
)
def test_other_addresses_are_refused_without_showing_them(rest):
    with pytest.raises(WrongUsage, match="https://HOST/FOLDER") as caught:
        parse_address(f"https://{rest}")
    assert "secret" not in str(caught.value)


def test_a_checkpoint_chooses_no_server(server, place, colours, cli):
    write_table(colours)
    fit(cli, "labels.csv", "run", "--data.root", place, "--test_after_fit", "false")
    STORAGES.pop("http")
    server.requests.clear()
    assert "may not choose an address" in error_line(cli, "test", "runs/fit/run")
    assert not server.requests
