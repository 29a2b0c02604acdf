"""What each storage of images must do: list, read, repeat failed requests, notice replaced files, and refuse."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from colours import QUICKEST
from object_server import ObjectServer, no_fault, object_server

from finetune import Classifier, ImageFolderData
from finetune.data import bucket
from finetune.data.addresses import StorageError
from finetune.data.archives import unpacked
from finetune.data.checking.findings import Finding, Row
from finetune.data.datasets.folders import class_folders
from finetune.data.datasets.scan import scan
from finetune.data.file_facts import UNKNOWN, look_at
from finetune.data.image_files import (
    absolute_path,
    file_stats,
    files_digest,
    kind_of,
    open_file,
    read_pieces,
)
from finetune.data.local_folders import local_folder
from finetune.data.mirror import Ahead, Mirror, map_files, mirror_of
from finetune.data.prediction_paths import files_to_predict
from finetune.data.seen import build_record
from finetune.data.walk import Skipped, find_images
from finetune.reports.check_page import write_lists
from finetune.system.messages import shown
from finetune.system.process_folder import process_folder


@pytest.fixture
def server(colours: Path) -> Iterator[ObjectServer]:
    """A bucket with the images of `colours` in its folder `set`."""
    with object_server() as server:
        server.put_folder(colours, "set")
        yield server


@pytest.fixture(params=["disk", "s3"])
def place(
    request: pytest.FixtureRequest, colours: Path, tmp_path: Path
) -> Iterator[tuple[str, Callable[[str, bytes], None]]]:
    """A place with these images in its folder `set`, and a function that writes a file there."""
    if request.param == "s3":
        server = request.getfixturevalue("server")
        yield server.address, server.put
    else:
        shutil.copytree(colours, tmp_path / "set", symlinks=True)

        def write(name: str, content: bytes) -> None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)

        yield str(tmp_path), write


def content_of(path: str) -> bytes:
    with open_file(path) as file:
        return file.read()


# All storages


def test_kinds_entries_and_pieces_are_those_of_a_folder(place, colours):
    folder, _ = place
    there = local_folder(f"{folder}//./set/")
    assert absolute_path(there) == f"{folder}/set"
    assert kind_of(f"{there}/train/red") == "folder"
    assert kind_of(f"{there}/train/red/00.png") == "file"
    assert kind_of(f"{there}/train/re") is None
    assert np.array_equal(scan(f"{folder}/set").counts(), scan(str(colours)).counts())
    with pytest.raises(FileNotFoundError, match=f"{folder}/other"):
        scan(f"{folder}/other")
    for num_bytes in (1, 7, 10**6):
        pieces = [
            read_pieces(
                f"{root}/train/red/00.png", num_bytes, lambda n: (0, n // 2, n - 3, n, n + 5)
            )
            for root in (there, str(colours))
        ]
        assert pieces[0] == pieces[1]


def test_a_data_module_reads_the_same_data_set(place, colours):
    here = ImageFolderData(str(colours), num_workers=0)
    there = ImageFolderData(f"{place[0]}/set", num_workers=0)
    assert there.fingerprint == here.fingerprint and there.class_names == here.class_names
    results = []
    for data in (here, there):
        seen = build_record(data.splits["train"], data.splits["val"])
        results.append((seen.train.tolist(), seen.val.tolist()))
    assert results[0] == results[1] and len(results[0][0]) == len(data.splits["train"])
    for split, part in here.splits.items():
        other = there.splits[split]
        assert list(other.names()) == list(part.names())
        assert np.array_equal(other.load_stats().sizes, part.load_stats().sizes)
        assert np.array_equal(other.read(3), part.read(3))


def test_names_with_unusual_characters(place):
    folder, write = place
    names = ["a%20b.png", "ä ö.png", "c+d&e=f.png", "[1].png"]
    for name in names:
        write(f"odd/x/{name}", name.encode())
    found = files_to_predict(f"{folder}/odd")
    assert sorted(map(absolute_path, found)) == sorted(f"{folder}/odd/x/{n}" for n in names)
    for path in found:
        assert content_of(path) == os.path.basename(path).encode()


def test_files_that_are_missing(place):
    folder, write = place
    write("one/a.png", b"123")
    root = local_folder(f"{folder}/one")
    paths = [f"{root}/{name}" for name in ("a.png", "none.png")]
    stats = file_stats(paths)
    assert stats.sizes.tolist() == [3, -1] and stats.is_regular.tolist() == [True, False]
    for read in (open_file, lambda path: file_stats([path], skip=False)):
        with pytest.raises(FileNotFoundError) as caught:
            read(paths[1])
        assert caught.value.filename == f"{folder}/one/none.png"


def test_a_replaced_file_is_noticed(place):
    folder, write = place

    def path() -> str:
        return f"{local_folder(f'{folder}/new')}/x/a.png"

    def digests() -> tuple[str, int]:
        paths = [path()]
        content = int(look_at(paths).digests[0])
        return files_digest(paths, file_stats(paths), folder), content

    write("new/x/a.png", b"123")
    first = digests()
    assert digests() == first  # the control
    time.sleep(0.02)  # the file system's clock ticks a hundred times a second or more
    write("new/x/a.png", b"456")
    second = digests()
    assert first[0] != second[0] and first[1] != second[1]
    assert content_of(path()) == b"456"


# A disk


@pytest.mark.parametrize("how", ["written over", "put in its place", "swapped"])
def test_a_file_replaced_by_one_of_its_size_and_time_is_noticed(tmp_path, how):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).write_bytes(b"123")
        os.utime(path, (5, 5))
    first = files_digest(paths, file_stats(paths), tmp_path)
    time.sleep(0.02)
    if how == "swapped":
        os.rename(paths[0], tmp_path / "c")
        os.rename(paths[1], paths[0])
        os.rename(tmp_path / "c", paths[1])
    else:
        target = paths[0] if how == "written over" else str(tmp_path / "new")
        Path(target).write_bytes(b"456")
        os.utime(target, (5, 5))
        os.replace(target, paths[0])
    status = os.stat(paths[0])
    assert (status.st_size, status.st_mtime) == (3, 5)  # the control: these say nothing
    assert files_digest(paths, file_stats(paths), tmp_path) != first


def test_a_pipe_and_a_folder_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert file_stats([str(tmp_path / "pipe"), str(tmp_path)]).is_regular.tolist() == [False] * 2
    assert look_at([str(tmp_path / "pipe")]).digests.tolist() == [UNKNOWN]
    with pytest.raises(OSError, match="a pipe"):
        open_file(tmp_path / "pipe")
    with pytest.raises(OSError, match=str(tmp_path)):
        open_file(tmp_path)


def test_a_fit_asks_the_disk_for_each_file_once_before_training(colours, cli, monkeypatch):
    """A disk of a network may need a millisecond for each."""
    asked: Counter[str] = Counter()
    before: list[Counter[str]] = []
    for name in ("stat", "lstat"):
        ask = getattr(os, name)

        def counted(path, *args, ask=ask, **options):
            asked[os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""] += 1
            return ask(path, *args, **options)

        monkeypatch.setattr(os, name, counted)
    step = Classifier.training_step
    monkeypatch.setattr(
        Classifier, "training_step", lambda *args: before.append(asked.copy()) or step(*args)
    )
    cli("fit", "--data.root", colours, *QUICKEST)
    files = [str(path) for path in Path(colours).rglob("*.png")]
    assert len(files) == 90 and {before[0][path] for path in files} == {1}


@pytest.mark.parametrize("target", ["store", "a", "a/b"])
def test_a_circle_of_links_is_found_however_long(tmp_path, target):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (tmp_path / "a/b/out").symlink_to(tmp_path / "store")
    (tmp_path / "store/back").symlink_to(tmp_path / target)
    skipped = Skipped()
    assert list(find_images(str(tmp_path / "a"), skipped)) == []
    (fault,) = skipped.faults
    assert fault.where.endswith("back") and fault.can_skip


# Object storage


def test_pieces_of_an_object_that_was_replaced_are_not_taken(server):
    data = ImageFolderData(f"{server.address}/set", num_workers=0)
    data.read()
    paths = data.splits["train"].paths
    server.put(absolute_path(paths[0]).removeprefix(f"{server.address}/"), b"x")
    with pytest.raises(StorageError, match="was replaced"):
        look_at(paths)


@pytest.mark.timeout(60)
def test_many_bitmaps_in_s3_which_are_read_whole_are_looked_at(server):
    for number in range(300):
        server.put(f"many/{number}.bmp", b"BM" + bytes(2**16 + number))
    found = files_to_predict(f"{server.address}/many")
    assert len(np.unique(look_at(found).digests)) == 300


@pytest.mark.parametrize("num_bytes", [20_000, 0])
def test_threads_may_read_copies_on_a_small_disk(server, monkeypatch, num_bytes):
    used = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used._replace(free=num_bytes))
    for number in range(300):
        server.put(f"many/{number}.png", bytes(200 + number))
    root = local_folder(f"{server.address}/many")
    paths = [f"{root}/{number}.png" for number in range(300)] * 2
    read = map_files(lambda path: len(content_of(path)), paths, num_threads=8)
    assert [*read] == [200 + number for number in range(300)] * 2


def test_a_fit_from_s3_begins_before_its_images_are_copied(server, colours):
    data = ImageFolderData(f"{server.address}/set", num_workers=0)
    data.setup("fit")
    paths = [path for split in data.splits.values() for path in split.paths]
    assert not any(mirror_of(path).has(path) for path in paths)
    here = ImageFolderData(str(colours), num_workers=0)
    here.setup("fit")
    assert np.array_equal(data.seen.train, here.seen.train)
    assert np.array_equal(data.seen.val, here.seen.val)
    for path in paths:  # the control
        open_file(path).close()
    assert all(mirror_of(path).has(path) for path in paths)


def test_a_folder_in_s3_is_listed_once_and_each_image_copied_once(server):
    data = ImageFolderData(f"{server.address}/set", num_workers=0)
    data.read()
    for part in data.splits.values():
        part.load_stats()
    assert server.requests == {"LIST": 1}
    for part in data.splits.values():
        _ = [*map_files(content_of, part.paths)]
    assert server.requests == {"LIST": 1, "GET": sum(map(len, data.splits.values()))}
    server.requests.clear()
    build_record(data.splits["train"], data.splits["val"])
    for _ in range(2):
        local_folder(f"{server.address}/set")  # as a later run does
        for part in data.splits.values():
            assert np.array_equal(
                [*map_files(content_of, part.paths)], [*map(content_of, part.paths)]
            )
    assert server.requests == {"LIST": 2}


def test_all_images_of_class_folders_in_s3_are_evaluated_without_a_second_list(server):
    data = ImageFolderData(f"{server.address}/set/train", num_workers=0)
    data.read()
    assert data.splits.keys() == {"train", "val", "test"}
    data.use_all_images("test")
    assert len(data.splits["test"]) == len(scan(f"{server.address}/set").splits["train"])
    assert server.requests == {"LIST": 2}  # of the data module, and of this test


@pytest.mark.parametrize("name", ["none", "none/list.txt"])
def test_a_place_in_s3_without_images_is_named(server, name):
    server.put("none/list.txt", b"\n")
    with pytest.raises(FileNotFoundError, match=f"{server.address}/{name}'"):
        files_to_predict(f"{server.address}/{name}")


def test_a_list_of_a_finding_has_the_addresses_of_images_in_s3(server, tmp_path):
    data = scan(f"{server.address}/set")
    row = Row([0], "")
    assert write_lists(tmp_path, data, [Finding("blank", "note", "is blank", "", [row])]) == 0
    assert (tmp_path / "blank.txt").read_text() == f"{server.address}/set/{data.name(0)}\n"


def test_notes_and_faults_of_a_place_in_s3_have_its_address(server):
    for name in ("train/extra/x.psd", "test/other/1.png"):
        server.put(f"set/{name}", b"1")
    data = scan(f"{server.address}/set")
    texts = [*data.notes, *(fault.advice() for fault in data.faults)]
    about = [text for text in texts if "/set" in text]
    assert len(about) >= 3 and all(f"{server.address}/set" in text for text in about)


def archive_in_s3(server: ObjectServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put an archive of a file `a.txt` in the bucket; the cache is empty."""
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
    (folder / "files").mkdir()
    (folder / "files/a.txt").write_text("1")
    archive = shutil.make_archive(str(folder / "photos"), "tar", folder / "files")
    server.put("photos.tar", Path(archive).read_bytes())
    return f"{server.address}/photos.tar"


def test_an_archive_in_s3_that_cannot_be_copied_is_a_fault_of_the_storage(
    server, tmp_path, monkeypatch
):
    place = archive_in_s3(server, tmp_path, monkeypatch)
    server.fault = lambda method, _: "deny" if method == "GET" else ""
    with pytest.raises(StorageError, match="access denied"):
        unpacked(place)
    server.fault = no_fault
    assert Path(unpacked(place), "a.txt").read_text() == "1"


def test_an_archive_on_a_server_without_etags_is_unpacked(server, tmp_path, monkeypatch):
    place = archive_in_s3(server, tmp_path, monkeypatch)
    server.has_e_tags = False
    assert Path(unpacked(place), "a.txt").read_text() == "1"


def test_an_object_that_is_replaced_after_the_list_is_named(server):
    server.put("new/a.png", b"123")
    path = f"{local_folder(f'{server.address}/new')}/a.png"
    server.put("new/a.png", b"456")
    with pytest.raises(StorageError, match="was replaced") as caught:
        open_file(path)
    assert f"{server.address}/new/a.png" in str(caught.value)
    assert local_folder(f"{server.address}/new/a.png") == path
    assert content_of(path) == b"456"


@pytest.mark.parametrize("content", [b"123", b"1234567"])
def test_an_object_without_an_etag_that_has_another_size_is_not_taken(server, content):
    server.has_e_tags = False
    server.put("new/a.png", b"12345")
    path = f"{local_folder(f'{server.address}/new')}/a.png"
    assert content_of(path) == b"12345"  # the control
    server.put("new/b.png", b"12345")
    path = f"{local_folder(f'{server.address}/new')}/b.png"
    server.put("new/b.png", content)
    for read in (open_file, lambda path: read_pieces(path, 9, lambda size: (0,))):
        with pytest.raises(StorageError, match="was replaced"):
            read(path)


def test_a_second_list_of_a_folder_deletes_no_file_in_use(server):
    server.put("new/a.png", b"123")
    first = Mirror(f"{server.address}/new", limit_bytes=1)
    (path,) = first.objects
    for _ in Ahead([path], lambda path: [path]):
        Mirror(f"{server.address}/new", limit_bytes=1)
        assert content_of(path) == b"123" and first.has(path)
    assert not first.has(path)  # no longer in use


def test_an_object_that_was_deleted_is_in_no_later_list(server):
    place = f"{server.address}/set/train"
    before = {path: content_of(path) for path in files_to_predict(place)}
    del server.objects["set/train/red/00.png"]
    for key in [key for key in server.objects if key.startswith("set/train/blue/")]:
        del server.objects[key]
    server.put("set/train/blue", b"1")  # where a folder was
    server.put("set/train/red/01.png/a.png", server.objects.pop("set/train/red/01.png"))
    assert kind_of(f"{local_folder(place)}/blue") == "file"
    after = {path: content_of(path) for path in files_to_predict(place)}
    is_there = [key.startswith("set/train/") and key.endswith(".png") for key in server.objects]
    assert len(after) == sum(is_there)
    assert {*after.values()} <= {*before.values()}


def test_an_object_and_a_folder_of_one_name_are_refused(server):
    server.put("both/x.png", b"1")
    server.put("both/x.png/a.png", b"2")
    with pytest.raises(StorageError, match="both/x.png is the name of an object and of a folder"):
        local_folder(f"{server.address}/both")


@pytest.mark.parametrize("in_use", [1, 4])
def test_a_mirror_larger_than_its_limit_deletes_no_file_of_the_last_batches(server, in_use):
    """The limit is three batches of five images, and `in_use` batches are with the workers."""
    names = [f"many/{i % 100}.png" for i in range(250)]
    for name in names:
        server.put(name, name.encode())
    limit = sum(map(len, names[:15]))
    mirror = Mirror(f"{server.address}/many", limit)
    batches = [names[i : i + 5] for i in range(0, 250, 5)]
    ahead = Ahead(batches, lambda batch: [f"{server.address}/{name}" for name in batch], in_use)
    most = 0
    for number, _ in enumerate(ahead):
        for name in chain(*batches[max(0, number + 1 - in_use) : number + 1]):
            copy = mirror.copy_of(f"{server.address}/{name}")
            assert Path(copy).read_bytes() == name.encode()
        most = max(most, sum(map(mirror.has, mirror.objects)))
    assert most <= 15 + 5 * (in_use + 2)


def test_a_part_of_a_folder_larger_than_the_disk_is_listed_and_read(server):
    folder = f"{server.address}/set"
    whole = Mirror(folder, limit_bytes=1).address
    part = local_folder(f"{folder}/train/red")
    for path in (f"{whole}/train/red/01.png", f"{part}/00.png", f"{whole}/train/blue/00.png"):
        key = absolute_path(path).removeprefix(f"{server.address}/")
        assert content_of(path) == server.objects[key]


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_folder_of_a_process_that_has_ended_is_deleted(tmp_path, is_killed):
    code = "import pathlib, sys; from finetune.system.process_folder import process_folder; "
    code += "print(process_folder(pathlib.Path(sys.argv[1])), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        theirs = Path(other.stdout.readline().strip())
        own = process_folder(tmp_path)
        assert theirs.is_dir() and own.is_dir()
        if is_killed:
            other.send_signal(signal.SIGKILL)
        other.stdin.close()
    assert theirs.exists() == is_killed
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    assert not theirs.exists() and own.is_dir()


def test_a_mark_of_a_folder_in_s3_is_no_image_and_hides_none(server):
    server.put("marks/", b"")
    server.put("marks/x/", b"")
    server.put("marks/x/a.png", b"1")
    server.put("marks/x/y/", b"")
    server.put("marks/x/y/b.png", b"2")
    server.put("marks/runs/fit/version_0/.finetune", b"")  # of --out s3://BUCKET/marks/runs
    server.put("marks/_SUCCESS", b"")  # the control
    place = f"{server.address}/marks"
    root = local_folder(place)
    assert class_folders(root) == [f"{root}/x"]
    assert kind_of(f"{root}/_SUCCESS") == "file" and kind_of(f"{root}/x") == "folder"
    assert sorted(files_to_predict(place)) == [f"{root}/x/a.png", f"{root}/x/y/b.png"]


@pytest.mark.parametrize("fault", ["truncate", "garbage"])
def test_a_listing_whose_answer_breaks_off_or_is_not_http_is_repeated(server, fault):
    server.fault = lambda *_: fault if server.requests["LIST"] < 3 else ""
    local_folder(f"{server.address}/set")
    assert server.requests == {"LIST": 3}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("truncate", "does not answer"),
        ("deny", "access denied"),
    ],
)
def test_a_server_that_refuses_is_one_line_about_the_object(server, monkeypatch, fault, words):
    monkeypatch.setattr(bucket, "START_SECONDS", 0.2)
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 0.2)
    path = f"{local_folder(f'{server.address}/set')}/train/red/00.png"
    server.fault = lambda *_: fault
    with pytest.raises(StorageError, match=words) as caught:
        open_file(path)
    assert absolute_path(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(StorageError, match=words):
        local_folder(f"{server.address}/set")


def test_an_address_outside_of_the_folders_that_were_searched_is_not_read(server):
    """It may come from an untrusted file."""
    path = f"{os.path.dirname(local_folder(f'{server.address}/set'))}/other/a.png"
    server.put("other/a.png", b"1")
    server.requests.clear()
    with pytest.raises(FileNotFoundError):
        open_file(path)
    assert not server.requests


@pytest.mark.parametrize("name", ["x//a.png", "Metadata//a.png", "x/../a.png", "x/\x1b[31m.png"])
def test_a_name_that_is_unsupported_is_named_and_escaped(server, name):
    server.put(f"bad/{name}", b"")
    with pytest.raises(StorageError, match="Rename or delete it") as caught:
        local_folder(f"{server.address}/bad")
    assert shown(f"bad/{name}") in str(caught.value)
    with pytest.raises(ValueError, match="the part '..'"):
        local_folder(f"{server.address}/bad/../x")


@pytest.mark.parametrize(
    ("scheme", "endpoint", "flag"),
    [
        ("s3", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"),
        ("gs", "GOOGLE_BASE_URL", "GOOGLE_ALLOW_HTTP"),
        ("az", "AZURE_STORAGE_ENDPOINT", "AZURE_ALLOW_HTTP"),
    ],
)
def test_an_endpoint_without_encryption_needs_leave(monkeypatch, scheme, endpoint, flag):
    settings = {"AZURE_STORAGE_ACCOUNT_NAME": "name", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}
    settings |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "a2V5"}
    settings |= {"GOOGLE_SKIP_SIGNATURE": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bucket, "START_SECONDS", 0.2)
    monkeypatch.setenv(endpoint, "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=f"{flag}=true"):
        bucket.head(f"{scheme}://photos/a", is_start=True)
    monkeypatch.setenv(flag, "true")
    monkeypatch.setenv(endpoint, "http://127.0.0.1:2")  # another client
    with pytest.raises(StorageError, match="does not answer"):
        bucket.head(f"{scheme}://photos/a", is_start=True)
