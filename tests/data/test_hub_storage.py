"""Images in a dataset of the hub: one listing at one commit, and the same files as on a disk."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import TOKEN, HubServer, Repository, dataset_server, put_folder
from huggingface_hub import constants
from processes import _free_port
from storage_checks import check_is_the_folder

from finetune import ImageFolderData
from finetune.data import hub_storage, object_requests
from finetune.data.addresses import StorageError, parse_address, real_place, repository_of
from finetune.data.contents import file_digests
from finetune.data.datasets.listing import list_images
from finetune.data.prediction_paths import files_to_predict
from finetune.data.storage import (
    file_stats,
    open_file,
    read_pieces,
    refresh,
    storage_of,
)
from finetune.system.messages import WrongUsage

PLACE = "hf://datasets/owner/photos"


@pytest.fixture
def server(colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server with the images of `colours` in the folder `set` of a dataset, and no client yet."""
    with dataset_server(tmp_path / "cache", monkeypatch) as server:
        put_folder(server, "owner/photos", colours, "set")
        yield server


def kinds(server: HubServer) -> Counter[str]:
    """Return the number of requests of each kind."""
    names = ("/revision/", "/tree/", "/paths-info/", "/resolve/", "/storage/")
    return Counter(
        next(name for name in names if name in path).strip("/") for _, path, _ in server.requests
    )


def test_addresses():
    address = parse_address("hf://datasets/a/b@v1//x/./y/")
    assert str(address) == "hf://datasets/a/b@v1/x/y" and address.key == "x/y"
    assert repository_of(address) == ("a/b", "v1")
    assert repository_of(parse_address("hf://datasets/a/b@refs%2Fpr%2F1")).revision == "refs/pr/1"
    assert repository_of(parse_address("hf://datasets/a/b")) == ("a/b", None)
    assert real_place("hf://datasets/a/b@v1/x") == real_place("hf://datasets/a/b/x")
    assert real_place("hf://datasets/a/b/x") != real_place("hf://datasets/a/c/x")  # the control


@pytest.mark.parametrize("rest", ["", "a", "a/", "/b", "user:secret@a/b", "a/b@x y", "a%2Fb/c"])
def test_other_addresses_are_refused_without_showing_them(rest):
    with pytest.raises(WrongUsage, match="hf://datasets/OWNER/NAME") as caught:
        parse_address(f"hf://datasets/{rest}")
    assert "secret" not in str(caught.value)


def test_a_folder_is_listed_once_and_its_files_are_not_asked_for(server, colours):
    there = ImageFolderData(f"{PLACE}/set", num_workers=0)
    there.read()
    assert kinds(server) == {"revision": 1, "tree": 1}
    here = ImageFolderData(str(colours), num_workers=0)
    here.read()
    assert there.fingerprint == here.fingerprint and there.class_names == here.class_names
    for split, part in here.splits.items():
        other = there.splits[split]
        assert list(other.names()) == list(part.names())
        assert np.array_equal(other.load_stats().sizes, part.load_stats().sizes)
    paths = there.splits["train"].paths
    assert np.array_equal(
        file_digests(paths, np.arange(len(paths))),
        file_digests(here.splits["train"].paths, np.arange(len(paths))),
    )
    assert kinds(server) == {"revision": 1, "tree": 1, "resolve": len(paths)}
    assert np.array_equal(there.splits["val"].read(3), here.splits["val"].read(3))
    assert {token for _, _, token in server.requests} == {TOKEN}


def test_a_list_of_several_pages_is_complete(server, colours):
    server.page_size = 7
    listing = list_images(f"{PLACE}/set")
    assert np.array_equal(listing.counts(), list_images(colours).counts())
    assert kinds(server)["tree"] > 10


def test_kinds_entries_and_pieces_are_those_of_the_folder(server, colours):
    check_is_the_folder(PLACE, colours)


def test_a_single_image_and_names_with_unusual_characters(server):
    names = ["a%20b.png", "\u00e4 \u00f6.png", "c+d&e=f.png", "[1]#?.png"]
    repository = server.repositories["datasets/owner/photos"]
    repository.commit({f"odd/{name}": name.encode() for name in names})
    assert sorted(files_to_predict(f"{PLACE}/odd")) == sorted(f"{PLACE}/odd/{n}" for n in names)
    for name in names:
        assert open_file(f"{PLACE}/odd/{name}").read() == name.encode()
    server.requests.clear()
    image = f"{PLACE}/set/test/red/00.png"
    assert list(files_to_predict(image)) == [image]
    assert kinds(server) == {"revision": 1, "tree": 1, "paths-info": 1}
    stats = file_stats([f"{PLACE}/odd/{names[0]}", f"{PLACE}/odd/none.png"])
    assert stats.sizes.tolist() == [len(names[0]), -1]


def test_all_reads_are_of_one_commit(server):
    repository = server.repositories["datasets/owner/photos"]
    first = next(iter(repository.commits))
    image = f"{PLACE}/set/train/red/00.png"
    refresh(f"{PLACE}/set")
    before = open_file(image).read()
    second = repository.commit({"set/train/red/00.png": b"other"})
    assert open_file(image).read() == before
    assert storage_of(image).commit(image) == first
    stats = file_stats([image])
    refresh(f"{PLACE}/set")
    assert open_file(image).read() == b"other"  # the control
    assert storage_of(image).commit(image) == second
    assert stats.times.tolist() != file_stats([image]).times.tolist()
    at_first = image.replace("photos", f"photos@{first}")
    refresh(at_first)
    assert open_file(at_first).read() == before


def test_a_large_file_is_read_from_another_host_without_the_token(server, monkeypatch):
    repository = server.repositories["datasets/owner/photos"]
    repository.large = frozenset(["set/train/red/00.png"])
    image = f"{PLACE}/set/train/red/00.png"
    refresh(f"{PLACE}/set")
    content = open_file(image).read()
    assert content == repository.files["set/train/red/00.png"]
    _, pieces = read_pieces(image, 10, lambda size: (0, 20))
    assert pieces == [content[:10], content[20:30]]
    tokens = {path.split("/")[1]: token for _, path, token in server.requests}
    assert tokens == {"api": TOKEN, "datasets": TOKEN, "storage": ""}


OTHER_HOST = "https://example.org/api/datasets/owner/photos/tree/main?cursor=7"
FILE = {"type": "file", "path": "set/red/0.png", "size": 5, "oid": "0" * 40}


def answer_with(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, action: str, body: object, link: str = ""
) -> None:
    """Answer requests for a description or a list with a body, which is JSON unless it is bytes, and a link."""
    original = server._dataset
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Link": f'<{link}>; rel="next"'} if link else {}

    def answer(match: re.Match[str], *more: Any) -> tuple[int, dict[str, str], bytes]:
        is_other = match["action"] != action
        return original(match, *more) if is_other else (200, {**headers}, content)

    monkeypatch.setattr(server, "_dataset", answer)


@pytest.mark.parametrize(
    ("action", "body", "text"),
    [
        ("revision", b"<html>log in</html>", "not JSON"),
        ("revision", [], "no commit"),
        ("revision", {"sha": "../../x"}, "no commit"),
        ("tree", b"<html>log in</html>", "not JSON"),
        ("tree", {"error": "no"}, "not a list"),
        ("tree", None, "not a list"),
        ("tree", ["set/red/0.png"], "not a list"),
        ("tree", [{**FILE, "size": None}], "size or the hash of set/red/0.png"),
        ("tree", [{**FILE, "size": 10**30}], "the size of set/red/0.png is 1000"),
        ("tree", [{**FILE, "size": -1}], "the size of set/red/0.png is -1"),
        ("tree", [{**FILE, "path": None}], "size or the hash"),
        ("tree", [{**FILE, "path": "set/../x.png"}], "set/../x.png is not in the folder"),
        ("tree", [{**FILE, "path": "set//x.png"}], "set//x.png is not in the folder"),
        ("tree", [{**FILE, "path": "/etc/x.png"}], "/etc/x.png is not in the folder"),
        ("tree", [{**FILE, "path": "settled/x.png"}], "settled/x.png is not in the folder"),
    ],
)
def test_an_answer_that_is_not_one_of_the_hub_is_reported(server, monkeypatch, action, body, text):
    answer_with(server, monkeypatch, action, body)
    with pytest.raises(StorageError, match=f"{text}.*: check HF_ENDPOINT"):
        refresh(f"{PLACE}/set")


def test_the_token_is_not_sent_to_a_server_that_a_list_names(server, monkeypatch):
    asked: list[str] = []
    original = hub_storage._answer

    def answer(url: str, *more: Any) -> Any:
        asked.append(url)
        return original(url, *more)

    monkeypatch.setattr(hub_storage, "_answer", answer)
    answer_with(server, monkeypatch, "tree", [FILE])
    refresh(f"{PLACE}/set")
    assert file_stats([f"{PLACE}/set/red/0.png"]).sizes.tolist() == [5]  # the control
    asked.clear()
    answer_with(server, monkeypatch, "tree", [FILE], OTHER_HOST)
    with pytest.raises(StorageError, match="link to the next page of a list is invalid"):
        refresh(f"{PLACE}/set")
    assert len(asked) == 3 and asked[2].endswith("/set?cursor=7")
    assert all(url.startswith(f"{server.address}/api/") for url in asked)
    answer_with(server, monkeypatch, "tree", [FILE], "/next")
    with pytest.raises(StorageError, match="link to the next page of a list is invalid"):
        refresh(f"{PLACE}/set")


@pytest.mark.parametrize("fault", ["unavailable", "limited", "cut"])
def test_failed_requests_are_repeated(server, fault):
    counts: Counter[str] = Counter()

    def fail_first(method: str, path: str) -> str:
        counts[path] += 1
        return fault if counts[path] == 1 else ""

    server.fault = fail_first
    refresh(f"{PLACE}/set")
    image = f"{PLACE}/set/train/red/00.png"
    content = server.repositories["datasets/owner/photos"].files["set/train/red/00.png"]
    assert open_file(image).read() == content
    assert min(counts.values()) >= 2


def test_a_hub_that_is_gone_and_a_deleted_repository_are_reported(server, monkeypatch):
    monkeypatch.setattr(hub_storage, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(object_requests, "START_SECONDS", 0.2)
    refresh(f"{PLACE}/set")
    image = f"{PLACE}/set/train/red/00.png"
    for fault, text in (("limited", "429"), ("unavailable", "503"), ("cut", "")):
        server.fault = lambda method, path, fault=fault: fault
        with pytest.raises(StorageError, match=f"{image}: the storage does not answer.*{text}"):
            open_file(image)
    server.fault = lambda method, path: "unavailable"
    with pytest.raises(StorageError, match=f"cannot list {PLACE}/set: .* status 503"):
        refresh(f"{PLACE}/set")
    server.fault = lambda method, path: ""
    assert open_file(image).read()
    server.repositories["datasets/owner/photos"] = Repository()
    with pytest.raises(StorageError, match="does not exist any more"):
        open_file(image)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{_free_port()}")
    with pytest.raises(StorageError, match="cannot list .* the connection to http"):
        refresh(f"{PLACE}/set")
