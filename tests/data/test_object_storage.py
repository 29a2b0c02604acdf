"""Images in object storage: one listing answers all questions about files, and they are the same as on a disk."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from object_server import ObjectServer, begin_test, object_server
from promise import promise
from storage_checks import check_is_the_folder

from finetune import ImageFolderData
from finetune.data import contents, fetching, object_requests
from finetune.data.addresses import StorageError
from finetune.data.checking.first_look import first_look
from finetune.data.contents import file_digests
from finetune.data.datasets.folders import class_folders
from finetune.data.fetching import fetch_ahead
from finetune.data.loader import SIGNALS
from finetune.data.prediction_paths import files_to_predict
from finetune.data.seen_record import add_digests
from finetune.data.storage import (
    file_stats,
    kind_of,
    open_file,
    refresh,
)
from finetune.data.tables.table_file import TableFile
from finetune.data.tables.table_rows import read_paths
from finetune.distributed import signals
from finetune.distributed.signals import SignalFlag
from finetune.system.messages import shown


@pytest.fixture(scope="module")
def running(colours: Path) -> Iterator[ObjectServer]:
    with object_server(is_moto=True) as server:
        server.put_folder(colours, "set")
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The server with the images of `colours` in its folder `set`, and no client yet."""
    yield from begin_test(running, monkeypatch)


def test_a_folder_is_listed_once_and_its_files_are_not_asked_for(server, colours):
    place = f"{server.address}/set"
    there = ImageFolderData(place, num_workers=0)
    there.read()
    assert server.requests == {"LIST": 1}
    here = ImageFolderData(str(colours), num_workers=0)
    here.read()
    assert there.fingerprint == here.fingerprint and there.class_names == here.class_names
    for split, part in here.splits.items():
        other = there.splits[split]
        assert list(other.names()) == list(part.names())
        assert np.array_equal(other.load_stats().sizes, part.load_stats().sizes)
    assert server.requests == {"LIST": 1}
    paths = there.splits["train"].paths
    assert np.array_equal(
        file_digests(paths, np.arange(len(paths))),
        file_digests(here.splits["train"].paths, np.arange(len(paths))),
    )
    assert server.requests == {"LIST": 1, "GET": len(paths)}
    assert np.array_equal(there.splits["val"].read(3), here.splits["val"].read(3))


@pytest.mark.parametrize("num_cached", [10**5, pytest.param(0, id="control")])
def test_the_checks_before_a_fit_request_each_image_once(server, colours, monkeypatch, num_cached):
    monkeypatch.setattr(contents, "_MOST_CACHED", num_cached)
    results = []
    for root in (colours, f"{server.address}/set"):
        data = ImageFolderData(str(root), num_workers=0)
        data.read()
        look = first_look(data.splits, data.class_names, data.scanned.folder)
        seen = add_digests(data.seen, data.splits["train"], data.splits["val"])
        results.append((look.plain(), seen.digests.tolist()))
    assert results[0] == results[1]
    num = sum(map(len, data.splits.values()))
    if num_cached:
        assert server.requests == {"LIST": 1, "GET": num}
    else:
        assert server.requests["GET"] >= num + len(seen.digests)


def test_kinds_entries_and_pieces_are_those_of_the_folder(server, colours):
    check_is_the_folder(server.address, colours)


def test_names_with_unusual_characters_and_marks_of_folders(server):
    names = ["a%20b.png", "ä ö.png", "c+d&e=f.png", "[1].png"]
    for name in names:
        server.put(f"odd/x/{quote(name)}", name.encode())
    server.put("odd/", b"")
    server.put("odd/x/", b"")
    place = f"{server.address}/odd"
    assert sorted(files_to_predict(place)) == sorted(f"{place}/x/{name}" for name in names)
    for name in names:
        assert open_file(f"{place}/x/{name}").read() == name.encode()
    assert kind_of(f"{place}/x") == "folder"
    stats = file_stats([f"{place}/x/{names[0]}", f"{place}/x/none.png"])
    assert stats.sizes.tolist() == [len(names[0]), -1] and stats.is_regular.tolist() == [
        True,
        False,
    ]


def test_the_mark_of_an_empty_folder_is_a_folder_and_no_image_is_hidden_by_one(server):
    server.put("marks/x/a.png", b"1")
    server.put("marks/x/a.png/b.png", b"2")
    server.put("marks/empty/", b"")
    server.put("marks/runs/fit/version_0/.finetune", b"")  # of --out s3://BUCKET/marks/runs
    server.put("marks/_SUCCESS", b"")  # the control
    place = f"{server.address}/marks"
    refresh(place)
    assert class_folders(place) == [f"{place}/empty", f"{place}/x"]
    assert kind_of(f"{place}/_SUCCESS") == "file"
    assert sorted(files_to_predict(place)) == [f"{place}/x/a.png", f"{place}/x/a.png/b.png"]


def test_globs_and_tables_there_are_refused(server):
    with pytest.raises(FileNotFoundError, match="globs find local files only"):
        files_to_predict(f"{server.address}/set/train/red/*.png")
    server.put("tables/t.csv", b"path\na.png\n")
    with pytest.raises(ValueError, match="copy it to a local folder"):
        files_to_predict(f"{server.address}/tables/t.csv")


def test_an_archived_object_is_called_so(server):
    server.send("PUT", "/photos/old/a.png", b"1", **{"x-amz-storage-class": "GLACIER"})
    refresh(f"{server.address}/old")
    with pytest.raises(StorageError, match=r"old/a\.png is in an archive class .* restore it"):
        open_file(f"{server.address}/old/a.png")


def test_a_listing_that_breaks_off_is_repeated(server, monkeypatch):
    def truncate_first(method: str, path: str) -> str:
        return "truncate" if server.requests["LIST"] < 3 else ""

    server.fault = truncate_first
    refresh(f"{server.address}/set")
    assert server.requests == {"LIST": 3}
    server.fault = lambda method, path: "truncate"
    monkeypatch.setattr(object_requests, "START_SECONDS", 0.2)
    with pytest.raises(StorageError, match="does not answer, or not as expected"):
        refresh(f"{server.address}/set")


@pytest.mark.parametrize(
    "name", ["metadata-photos", pytest.param("photos", id="control: another name")]
)
def test_a_name_in_an_address_is_not_taken_for_a_reason(name, server, monkeypatch):
    """A message about credentials would be found by the word metadata."""
    monkeypatch.setattr(object_requests, "START_SECONDS", 0.2)
    server.fault = lambda method, path: "truncate"
    with pytest.raises(StorageError, match="does not answer, or not as expected"):
        refresh(f"{server.address}/{name}")


ENDPOINTS = [
    ("s3", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"),
    ("gs", "GOOGLE_BASE_URL", "GOOGLE_ALLOW_HTTP"),
    ("az", "AZURE_STORAGE_ENDPOINT", "AZURE_ALLOW_HTTP"),
]


@pytest.mark.parametrize(("scheme", "endpoint", "flag"), ENDPOINTS)
def test_an_endpoint_without_encryption_is_used_by_its_own_scheme(
    monkeypatch, scheme, endpoint, flag
):
    for _, *names in ENDPOINTS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    place = f"{scheme}://bucket"
    is_allowed = object_requests._is_http_allowed
    assert not is_allowed(place)
    monkeypatch.setenv(endpoint, "http://127.0.0.1:1")
    assert [other for other, *_ in ENDPOINTS if is_allowed(f"{other}://bucket")] == [scheme]
    monkeypatch.setenv(endpoint, "http://storage.example")
    with pytest.raises(StorageError, match=f"not encrypted: use https, or set {flag}=true"):
        is_allowed(place)
    monkeypatch.setenv(flag, "true")
    assert is_allowed(place)
    monkeypatch.setenv(endpoint, "https://storage.example")
    assert not is_allowed(place)


@pytest.mark.parametrize("name", ["x//a.png", "Metadata//a.png", "x/../a.png", "x/\x1b[31m.png"])
def test_a_name_that_is_unsupported_is_named_and_escaped(server, name):
    server.put(quote(f"bad/{name}"), b"")
    with pytest.raises(StorageError, match="Rename or delete it") as caught:
        refresh(f"{server.address}/bad")
    assert repr(shown(f"bad/{name}")) in str(caught.value)
    with pytest.raises(StorageError, match="are unsupported"):
        refresh(f"{server.address}/bad/../x")
    server.send("DELETE", f"/photos/{quote(f'bad/{name}')}")


def test_two_rows_of_an_image_have_the_same_path():
    names = ["x/a.png", "x//a.png", "./x/a.png", "s3://photos/set/x/./a.png"]
    table = TableFile(Path("t.csv"), {"path": names}, [2, 3, 4, 5])
    paths, faults = read_paths(table, "path", "s3://photos/set")
    assert set(paths) == {"s3://photos/set/x/a.png"} and not faults


@promise("object-storage-failures")
def test_a_signal_ends_the_wait_for_an_answer(server):
    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    handler = signal.signal(signal.SIGALRM, stop)
    server.delay = 4.0
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(Stopped):
        refresh(f"{server.address}/set")
    signal.signal(signal.SIGALRM, handler)
    assert time.monotonic() - began < 2


@promise("object-storage-failures")
def test_a_blocked_signal_ends_a_long_wait_for_the_next_images(server, monkeypatch):
    refresh(f"{server.address}/set")
    files = {f"{server.address}/set/train/red/00.png": 0}
    monkeypatch.setattr(fetching, "_POLL_SECONDS", 0.05)
    flag = SignalFlag()
    flag.install()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # as while workers start
    try:
        for patience, delay in ((60.0, 0.3), (0.1, 3.0)):  # the answer comes in time, and not
            monkeypatch.setattr(signals, "_PATIENCE", patience)
            server.delay = delay
            fetched = fetch_ahead([0], lambda _: files, signals.handle_signals_while_waiting)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            if delay < patience:
                assert [len(group.contents) for group in fetched] == [1]
                assert flag.received == signal.SIGTERM
            else:
                with pytest.raises(signals.Interrupted):
                    next(fetched)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        flag.restore()


def test_one_more_batch_is_fetched_ahead_however_large_it_is(server, monkeypatch):
    monkeypatch.setattr(fetching, "_NUM_AHEAD", 1)
    folder = f"{server.address}/set/train/red"
    refresh(folder)
    fetched = fetch_ahead(
        range(4), lambda i: {f"{folder}/{2 * i + j:02d}.png": 0 for j in range(2)}
    )
    assert len(next(fetched).contents) == 2
    deadline = time.monotonic() + 10
    while server.requests["GET"] < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert server.requests["GET"] == 4  # and no third batch
    assert [len(batch.contents) for batch in fetched] == [2, 2, 2]


def test_a_replaced_object_is_noticed_by_its_e_tag(server):
    path = f"{server.address}/new/x/a.png"
    server.put("new/x/a.png", b"123")
    refresh(f"{server.address}/new")
    before = file_stats([path])
    digest = file_digests([path], np.arange(1))
    assert open_file(path).read() == b"123"
    server.put("new/x/a.png", b"456")
    with pytest.raises(StorageError, match=r"new/x/a\.png was replaced"):
        open_file(path)
    refresh(f"{server.address}/new")
    assert open_file(path).read() == b"456"  # the control
    assert file_digests([path], np.arange(1)) != digest
    after = file_stats([path])
    assert before.sizes == after.sizes and before.times[0, 1] != after.times[0, 1]
