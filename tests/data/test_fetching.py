"""Neighbours in a shard are read by one request, with the errors of reading each image alone."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from object_server import ObjectServer, begin_test, object_server

from finetune import ImageFolderData
from finetune.data import fetching, storage
from finetune.data.addresses import StorageError
from finetune.data.fetching import Content, fetch_ahead
from finetune.data.pack_place import INDEX
from finetune.data.packing import Target, find_source, pack_images
from finetune.data.storage import PACKS, Place, refresh
from finetune.data.tables.table_rows import TableOptions

GROUP = 4


@pytest.fixture(scope="module")
def running(colours: Path) -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(
    running: ObjectServer, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectServer]:
    """The server with the packed images of `colours`, which no storage has listed yet."""
    for test in begin_test(running, monkeypatch):
        with ExitStack() as stack:
            source = find_source(str(colours), None, TableOptions())
            pack_images(source, Target(f"{test.address}/packed", stack), 10**6)
        PACKS.clear()
        yield test
        PACKS.clear()


def packed_paths(server: ObjectServer, split: str) -> list[str]:
    """Return the addresses of the images of a split, in their order, and count requests from now on."""
    place = f"{server.address}/packed"
    refresh(place)
    server.requests.clear()
    return [path for path in all_paths(server) if path.startswith(f"{place}/{split}/")]


def all_paths(server: ObjectServer) -> list[str]:
    lines = server.objects[f"packed/{INDEX}"].splitlines()
    return [f"{server.address}/packed/{json.loads(line)['path']}" for line in lines]


def fetched(paths: list[str], num_planned: int = 1) -> dict[str, Content]:
    groups = [paths[i : i + GROUP] for i in range(0, len(paths), GROUP)]
    contents: dict[str, Content] = {}
    for group in fetch_ahead(
        groups, lambda group: dict.fromkeys(group, 9000), num_planned=num_planned
    ):
        assert list(group.contents) == group.group
        contents |= group.contents
    return contents


@pytest.mark.parametrize(
    ("gap", "expected"), [(fetching._GAP, 1), pytest.param(-(10**9), 30, id="control")]
)
def test_neighbours_are_read_by_one_request(server, colours, monkeypatch, gap, expected):
    monkeypatch.setattr(fetching, "_GAP", gap)
    paths = packed_paths(server, "test")
    contents = fetched(paths)
    assert server.requests == {"GET": expected}
    for path in paths:
        name = path.removeprefix(f"{server.address}/packed/")
        assert contents[path] == (colours / name).read_bytes()


def test_images_of_later_groups_are_read_with_their_block(server, monkeypatch):
    # training images are in a random order
    paths = packed_paths(server, "train")
    monkeypatch.setattr(fetching, "_NUM_PLANNED", 0)
    monkeypatch.setattr(fetching, "_GAP", 0)
    monkeypatch.setattr(fetching, "_NUM_AHEAD", 8)
    contents = fetched(paths)
    of_few_groups = server.requests["GET"]
    server.requests.clear()
    assert fetched(paths, num_planned=100) == contents and len(contents) == 60
    assert server.requests["GET"] == 1 < 20 < of_few_groups


def test_an_image_that_two_groups_need_is_there_twice(server):
    paths = packed_paths(server, "test")[:GROUP]
    contents = [
        fetched.contents
        for fetched in fetch_ahead([0, 1], lambda i: dict.fromkeys(paths[i:], 9000))
    ]
    assert list(contents[0]) == paths and list(contents[1]) == paths[1:]
    assert all(contents[0][path] == contents[1][path] != b"" for path in paths[1:])


def test_contents_are_released_when_their_group_is_done(server, monkeypatch):
    paths = packed_paths(server, "test")
    read: list[list[Content]] = []

    def reading(paths: list[str]) -> list[Content]:
        read.append(original(paths))
        return read[-1]

    original = fetching._packed_contents
    monkeypatch.setattr(fetching, "_packed_contents", reading)
    groups = fetch_ahead([paths[:10], paths[10:]], lambda group: dict.fromkeys(group, 9000))
    assert len(next(groups).contents) == 10
    assert len(read) == 1 and [content != b"" for content in read[0]] == [False] * 10 + [True] * 20
    assert len(next(groups).contents) == 20
    assert not any(read[0])


def place(begin: int, size: int) -> Place:
    return Place("shard", begin, begin + size)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([place(0, 10), place(10, 10)], [0, 1]),
        ([place(10, 10), place(0, 10)], [1, 0]),
        ([place(0, 10), place(10 + 2**15 + 10, 10)], [0, 1]),
        ([place(0, 10), place(11 + 2**15 + 10, 10)], [0]),
        ([place(0, 10), place(10 + 2**15 + 10**5, 10**5)], [0, 1]),  # a large one
        ([place(50_000, 10), place(0, 10), place(49_000, 10)], [2, 0]),
        ([place(0, 10), place(50_000, 10), place(60_000, 10)], [0]),
        ([place(0, 99_999), place(5, 10), place(100_000, 10)], [0, 1, 2]),
    ],
)  # fmt: skip
def test_gaps_up_to_a_limit_are_read(places, expected):
    group = fetching._PlannedGroup(None, {}, {})
    files = [fetching._PackedFile(place, str(i), group) for i, place in enumerate(places)]
    together = fetching._neighbours(files, files[0])
    assert [int(file.path) for file in together] == expected


def test_a_block_limits_a_request(server, monkeypatch):
    paths = packed_paths(server, "test")
    size = len(server.objects["packed/shard-00001.tar"])
    monkeypatch.setattr(storage, "BLOCK_BYTES", 50_000)
    fetched(paths)
    assert server.requests["GET"] == -(-size // 50_000)


def test_a_changed_neighbour_is_named(server):
    paths = packed_paths(server, "test")
    rows = {
        row["path"]: row for row in map(json.loads, server.objects[f"packed/{INDEX}"].splitlines())
    }
    row = rows["test/green/03.png"]
    shard = bytearray(server.objects[f"packed/{row['shard']}"])
    shard[row["offset"] + 50] ^= 1
    server.objects[f"packed/{row['shard']}"] = bytes(shard)
    with pytest.raises(
        StorageError, match=r"test/green/03\.png: its bytes in .*shard-.*tar are not those"
    ):
        fetched(paths)
    others = [path for path in paths if not path.endswith("green/03.png")]
    assert len(fetched(others)) == 29  # the control


@pytest.mark.parametrize("fault", ["unavailable", "cut", "truncate"])
def test_a_request_for_neighbours_is_repeated(server, fault):
    paths = packed_paths(server, "test")
    answers = iter([fault, fault])
    server.fault = lambda method, path: next(answers, "")
    contents = fetched(paths)
    server.fault = lambda method, path: ""
    assert contents == fetched(paths) and len(contents) == 30
    assert server.requests["GET"] == 4


def test_a_shard_that_is_gone_is_named(server):
    paths = packed_paths(server, "test")
    del server.objects["packed/shard-00001.tar"]
    with pytest.raises(StorageError, match=r"blue/00\.png: cannot read .*/shard-00001\.tar"):
        fetched(paths)


def test_missing_and_unpacked_files_are_read_alone(server):
    server.put("other/a.png", b"123")
    paths = packed_paths(server, "test")[:2]
    refresh(f"{server.address}/other")
    more = [f"{server.address}/other/a.png", f"{server.address}/packed/test/none.png"]
    contents = fetched([*paths, *more])
    assert contents[more[0]] == b"123" and isinstance(contents[more[1]], FileNotFoundError)


def test_an_evaluation_reads_a_block_by_one_request(server):
    data = ImageFolderData(f"{server.address}/packed", num_workers=0, batch_size=GROUP)
    data.read()
    server.requests.clear()
    assert sum(len(batch["index"]) for batch in data.loader("test")) == 30
    assert server.requests == {"GET": 1}


def epoch_requests(server: ObjectServer, **options: Any) -> int:
    """Return the number of requests for an epoch of the 53 training images."""
    data = ImageFolderData(
        f"{server.address}/packed", num_workers=0, batch_size=GROUP, image_size=28, **options
    )
    data.read()
    server.requests.clear()
    assert sum(len(batch["index"]) for batch in data.loader("train", train=True)) == 53
    return server.requests["GET"]


def test_an_epoch_in_a_window_reads_each_block_once(server, monkeypatch):
    size = len(server.objects["packed/shard-00000.tar"])
    monkeypatch.setattr(storage, "BLOCK_BYTES", 50_000)
    monkeypatch.setattr(fetching, "_NUM_PLANNED", 0)
    monkeypatch.setattr(fetching, "_NUM_AHEAD", 4)
    num_blocks = -(-size // 50_000)
    assert num_blocks > 8
    assert epoch_requests(server, shuffle_window=12) == num_blocks
    assert epoch_requests(server) > 40  # the control
    # partners are drawn from all images
    assert num_blocks < epoch_requests(server, shuffle_window=12, mixup=0.2) < 53
