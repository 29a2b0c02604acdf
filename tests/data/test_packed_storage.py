"""Packed folders: the images are found at the paths that they had, and an index or a shard with a fault is refused."""

import json
import os
import resource
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import ImageFolderData
from finetune.data import packed_storage
from finetune.data.addresses import StorageError
from finetune.data.contents import file_digests
from finetune.data.pack_place import INDEX, pack_above
from finetune.data.packed_storage import TAR_BLOCK, TAR_RECORD, PackedStorage, padded_size
from finetune.data.packing import Target, find_source, pack_images
from finetune.data.prediction_paths import files_to_predict
from finetune.data.samples import PathList
from finetune.data.storage import (
    PACKS,
    LocalStorage,
    file_stats,
    kind_of,
    open_file,
    read_pieces,
)
from finetune.data.tables.table_rows import TableOptions
from finetune.system.messages import WrongUsage, reason


@pytest.fixture(autouse=True)
def no_pack_in_use() -> Iterator[None]:
    PACKS.clear()
    yield
    PACKS.clear()


def pack(source: Path, out: Path, shard_bytes: int = 200_000) -> tuple[int, int]:
    table = str(source) if source.is_file() else None
    with ExitStack() as stack:
        found = find_source(str(source), table, TableOptions())
        return pack_images(found, Target(str(out), stack), shard_bytes)


@pytest.fixture(scope="module")
def original(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs") / "packed"
    assert pack(colours, folder) == (90, 6)
    return folder


@pytest.fixture
def packed(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "packed"))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / INDEX).read_text().splitlines()]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / INDEX).write_text("".join(json.dumps(row) + "\n" for row in rows))


def images_of(place: Path) -> ImageFolderData:
    data = ImageFolderData(str(place), num_workers=0)
    data.read()
    return data


def test_a_packed_folder_is_the_same_data_set(colours, packed):
    here = images_of(colours)
    there = images_of(packed)
    assert there.fingerprint == here.fingerprint and there.class_names == here.class_names
    for split, part in here.splits.items():
        other = there.splits[split]
        assert list(other.names()) == list(part.names())
        assert np.array_equal(other.load_stats().sizes, part.load_stats().sizes)
        assert np.array_equal(other.read(2), part.read(2))
        everything = np.arange(len(part))
        digests = file_digests(part.paths, everything)
        assert np.array_equal(file_digests(other.paths, everything), digests)
        assert len(set(digests)) == len(digests)  # the control


def test_kinds_entries_and_pieces_are_those_of_the_folder(colours, packed, monkeypatch):
    monkeypatch.chdir(packed.parent)
    for place in ("packed", "./packed", str(packed)):
        assert kind_of(f"{place}/train/red") == kind_of(f"{place}/train/red/") == "folder"
        assert kind_of(f"{place}/train/red/00.png") == "file"
        assert kind_of(f"{place}/train/re") is None
        assert kind_of(f"{place}/train/red/00.png/more") is None
        assert kind_of(f"{place}/../packed/train/red/00.png") == "file"
        assert pack_above(f"{place}/train/red") == place
        found = list(files_to_predict(f"{place}/test/red"))
        assert found == [f"{place}/test/red/{i:02d}.png" for i in range(10)]
        with open_file(found[3]) as file:
            assert file.read() == (colours / "test/red/03.png").read_bytes()
        pieces = read_pieces(found[3], 100, lambda size: (0, size - 7, size + 9))
        assert pieces == read_pieces(
            str(colours / "test/red/03.png"), 100, lambda size: (0, size - 7, size + 9)
        )
        missing = file_stats([found[0], f"{place}/test/red/10.png"])
        assert missing.sizes.tolist()[1] == -1 and missing.is_regular.tolist() == [True, False]
        with pytest.raises(FileNotFoundError):
            open_file(f"{place}/test/red/10.png")
        PACKS.clear()
    assert kind_of("packed") == "folder" and kind_of("other/train") is None


def test_a_new_index_is_read_and_a_folder_without_one_is_not_packed(colours, packed):
    assert len(images_of(packed).splits["test"]) == 30
    write_rows(packed, [row for row in rows_of(packed) if row["path"] != "test/red/03.png"])
    assert len(images_of(packed).splits["test"]) == 29
    PACKS.clear()
    (packed / INDEX).unlink()  # of a pack that was killed
    with pytest.raises(ValueError, match="shards of a packed folder without index.jsonl"):
        images_of(packed)


def cut(packed: Path) -> None:
    with open(packed / "shard-00000.tar", "rb+") as file:
        file.truncate(50_000)


def link(packed: Path) -> None:
    other = packed.parent / "elsewhere.tar"
    (packed / "shard-00003.tar").rename(other)
    (packed / "shard-00003.tar").symlink_to(other)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut, r"shard-00000.tar, which holds train/\w+/\d\d.png: it has 50,000 bytes instead of"),
        (lambda packed: (packed / "shard-00003.tar").unlink(), "it is missing"),
        (link, "it is a link"),
        (lambda packed: (packed / INDEX).write_text(""), "index.jsonl is empty"),
        (
            lambda packed: (packed / INDEX).write_bytes((packed / INDEX).read_bytes()[:-30]),
            "line 90: it is not JSON",
        ),
        (
            lambda packed: (packed / INDEX).write_text("\n".join((packed / INDEX).read_text().split("\n")[:50])),
            "bytes instead of",
        ),
    ],
    ids=["cut", "missing", "link", "empty", "cut index", "half an index"],
)  # fmt: skip
def test_an_incomplete_copy_is_one_line(packed, damage: Callable[[Path], None], expected):
    images_of(packed)
    damage(packed)
    PACKS.clear()
    with pytest.raises(StorageError, match=expected) as caught:
        images_of(packed)
    assert "\n" not in str(caught.value) and "pack the images again" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("shard", "../secret.tar", "'../secret.tar' is not a shard in the folder"),
        ("shard", "/etc/passwd", "'/etc/passwd' is not a shard"),
        ("shard", "shard-00000.tar/../x.tar", "is not a shard"),
        ("shard", "shard-99999.tar", "shard-99999.tar, which holds train/red/19.png: it is missing"),
        ("path", "../outside.png", "the path '../outside.png' is not one in the folder"),
        ("path", "/etc/passwd", "is not one in the folder"),
        ("path", "train/./z.png", "is not one in the folder"),
        ("path", "train//z.png", "is not one in the folder"),
        ("path", "train/z\0.png", "is not one in the folder"),
        ("path", "\ud800", "is not one in the folder"),
        ("path", 3, "the path '3' is not one"),
        ("path", "train/red/00.png", "the paths are not sorted"),
        ("offset", -512, "the offset -512 is not from 0"),
        ("offset", True, "the offset True is not from 0"),
        ("offset", 2**63, "the offset 9223372036854775808 is not from 0"),
        ("offset", 10**6, "bytes instead of"),
        ("size", 2**40, "the size 1099511627776 is not from 0"),
        ("size", 10**6, "bytes instead of"),
        ("size", 1.5, "the size 1.5"),
        ("digest", "0", "the digest is not 16 hexadecimal digits"),
    ],
)  # fmt: skip
def test_an_index_reads_nothing_but_its_shards(packed, key, value, expected):
    rows = rows_of(packed)
    assert rows[-1]["path"] == "train/red/19.png"
    rows[-1][key] = value
    write_rows(packed, rows)
    with pytest.raises(StorageError, match=expected) as caught:
        images_of(packed)
    assert "\n" not in str(caught.value)


def test_changed_bytes_are_one_line_with_shard_and_image(packed):
    data = images_of(packed)
    row = next(row for row in rows_of(packed) if row["path"] == "test/red/03.png")
    names = list(data.splits["test"].names())
    data.splits["test"].read(names.index("test/red/03.png"))
    with open(packed / row["shard"], "rb+") as file:
        file.seek(row["offset"] + row["size"] - 20)
        file.write(b"x")
    with pytest.raises(StorageError, match="test/red/03.png: its bytes in .*shard-.*tar are not"):
        data.splits["test"].read(names.index("test/red/03.png"))
    data.splits["test"].read(names.index("test/red/04.png"))


def test_an_image_of_an_offset_of_another_one_is_refused(packed):
    rows = rows_of(packed)
    for name in ("shard", "offset", "size"):
        rows[3][name] = rows[4][name]
    write_rows(packed, rows)
    data = images_of(packed)
    with pytest.raises(StorageError, match="are not those that were packed"):
        data.splits["test"].read(list(data.splits["test"].names()).index(rows[3]["path"]))


def test_a_shard_that_goes_during_a_run_is_no_fault_of_an_image(packed):
    data = images_of(packed)
    for shard in packed.glob("shard-*"):
        shard.unlink()
    with pytest.raises(StorageError, match=r"00.png: cannot read .*shard-.*: No such file"):
        data.splits["test"].read(0)


def test_few_files_are_open(packed):
    data = images_of(packed)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(len(data.splits["train"])):
        data.splits["train"].read(i)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_has_images_of_one_split_and_training_images_in_a_random_order(packed):
    shards = []
    for path in sorted(packed.glob("shard-*.tar")):
        assert path.stat().st_size <= 200_000
        with tarfile.open(path) as tar:
            shards.append(tar.getnames())
    splits = [{name.split("/")[0] for name in names} for names in shards]
    assert splits == [{"train"}] * 4 + [{"test"}] * 2
    assert len({name.split("/")[1] for name in shards[0]}) == 3
    labels = {name.split("/")[1]: name for name in shards[0] if name.endswith(".cls")}
    with tarfile.open(packed / "shard-00000.tar") as tar:
        indices = {label: tar.extractfile(name).read() for label, name in labels.items()}  # type: ignore[union-attr]
    assert indices == {"blue": b"0", "green": b"1", "red": b"2"}


def test_a_table_is_packed_with_its_columns(colours, tmp_path):
    folder = tmp_path / "photos"
    shutil.copytree(colours / "train", folder / "flat")
    lines = ["photo,breed,group,weight,split"]
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        split = "test" if i % 20 > 15 else "train"
        lines.append(f"{path.relative_to(folder)},{'ab'[i % 2]},g{i // 3},{i % 5 / 7},{split}")
    table = folder / "labels.csv"
    table.write_text("\n".join(lines) + "\n")
    options = TableOptions(columns={"path": ("photo",), "label": ("breed",)})
    with ExitStack() as stack:
        source = find_source(str(folder), str(table), options)
        pack_images(source, Target(str(tmp_path / "packed"), stack), 10**6)
    columns = {"path": ["photo"], "label": ["breed"]}
    here = ImageFolderData(table=str(table), columns=columns, num_workers=0)
    there = ImageFolderData(table=str(tmp_path / "packed" / INDEX), num_workers=0)
    here.read()
    there.read()
    assert there.fingerprint == here.fingerprint
    for split, part in here.splits.items():
        other = there.splits[split]
        assert list(other.names()) == list(part.names())
        assert other.groups is not None and np.array_equal(other.groups, part.groups)
        assert np.array_equal(other.read(2), part.read(2))
    assert np.array_equal(there.splits["train"].weights, here.splits["train"].weights)
    with pytest.raises(WrongUsage, match="has the packed images of a table: pass its table"):
        images_of(tmp_path / "packed")


def test_several_labels_are_packed(colours, tmp_path):
    paths = sorted((colours / "train").rglob("*.png"))
    labels = [[], ["a;b"], ["a;b", "c"]]
    rows = [
        {"path": str(path.relative_to(colours)), "labels": labels[i % 3]}
        for i, path in enumerate(paths)
    ]
    table = colours.parent / "several.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = TableOptions(root=str(colours))
    with ExitStack() as stack:
        source = find_source("", str(table), options)
        pack_images(source, Target(str(tmp_path / "packed"), stack), 10**6)
    here = ImageFolderData(root=str(colours), table=str(table), num_workers=0)
    there = ImageFolderData(table=str(tmp_path / "packed" / INDEX), num_workers=0)
    here.read()
    there.read()
    assert there.class_names == ["a;b", "c"] and there.fingerprint == here.fingerprint
    with tarfile.open(tmp_path / "packed/shard-00000.tar") as tar:
        texts = {tar.extractfile(m).read() for m in tar if m.name.endswith(".json")}  # type: ignore[union-attr]
    assert {tuple(json.loads(text)["labels"]) for text in texts} == {(), ("a;b",), ("a;b", "c")}


def test_members_have_names_that_webdataset_keeps_apart(colours, tmp_path):
    image = (colours / "train/red/00.png").read_bytes()
    names = ["a.1.png", "a.2.png", "b.jpg", "b.png", "b%png.png", "c d.png", "é.png"]
    for name in names:
        for label in ("x", "y.z"):
            path = tmp_path / "photos" / "val" / label / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
            shutil.copytree(path.parent, tmp_path / "photos" / "train" / label, dirs_exist_ok=True)
    pack(tmp_path / "photos", tmp_path / "packed", 10**6)
    with tarfile.open(tmp_path / "packed/shard-00001.tar") as tar:
        members = tar.getnames()
    # webdataset: the key is all up to the first dot of the file name, and neighbours of one key are one sample
    keys = [
        f"{name.rpartition('/')[0]}/{name.rpartition('/')[2].split('.')[0]}" for name in members
    ]
    samples = [keys[i : i + 2] for i in range(0, len(keys), 2)]
    assert all(first == second for first, second in samples)
    assert len({first for first, _ in samples}) == len(samples) == 14
    here = images_of(tmp_path / "photos")
    assert images_of(tmp_path / "packed").fingerprint == here.fingerprint


def test_a_failed_pack_leaves_no_shards_and_a_killed_one_is_named(colours, tmp_path, monkeypatch):
    def fail(content: bytes) -> int:
        raise OSError(28, "No space left on device")

    out = tmp_path / "packed"
    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.packing.content_digest", fail)
        with pytest.raises(OSError, match="No space left"):
            pack(colours, out)
    assert list(out.iterdir()) == []
    pack(colours, out)
    with pytest.raises(WrongUsage, match="packed is not empty: name a new folder, or delete it"):
        pack(colours, out)


def test_a_full_disk_is_one_line_and_leaves_no_shards(colours, tmp_path):
    out = tmp_path / "packed"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # writing fails, and again when the file is closed, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            pack(colours, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert reason(caught.value) == f"File too large: {out}"
    assert list(out.iterdir()) == []
    pack(colours, out)  # the control
    assert len(list(out.iterdir())) == 7


def test_a_damaged_pack_next_to_a_folder_without_classes_is_not_its_fault(packed):
    other = packed.parent / "empty"
    other.mkdir()
    cut(packed)
    with pytest.raises(ValueError, match="empty has no class folders"):
        images_of(other)
    with pytest.raises(StorageError, match="bytes instead of"):  # the control
        images_of(packed)


def test_images_outside_of_the_folder_of_a_table_are_refused(colours, tmp_path):
    paths = [*(colours / "train").rglob("*.png")]
    lines = [f"{path},{path.parent.name}" for path in paths]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,label", *lines]) + "\n")
    with pytest.raises(WrongUsage, match="is not in .*: pass the folder of all images as --root"):
        pack(table, tmp_path / "packed")


def test_the_digest_depends_on_each_byte():
    first = packed_storage.content_digest(b"ab")
    assert first != packed_storage.content_digest(b"ac") and 0 <= first < 2**64


@pytest.mark.parametrize("num_near", [packed_storage._NEAR, pytest.param(1, id="control")])
def test_rows_of_a_split_are_found_near_the_last_one(tmp_path, monkeypatch, num_near):
    names = [f"{i:04}.png" for i in range(4000)]
    rows = [
        {"path": name, "shard": "shard-00000.tar", "offset": 0, "size": i, "digest": f"{i:016x}"}
        for i, name in enumerate(names)
    ]
    write_rows(tmp_path, rows)
    with open(tmp_path / "shard-00000.tar", "wb") as shard:
        shard.truncate(padded_size(padded_size(3999) + 2 * TAR_BLOCK, TAR_RECORD))
    monkeypatch.setattr(packed_storage, "_NEAR", num_near)
    storage = PackedStorage(str(tmp_path), LocalStorage(finds_packs=False))
    num_read = 0
    by_index = PathList.__getitem__

    def counted(paths: PathList, i: int) -> str:
        nonlocal num_read
        num_read += 1
        return by_index(paths, i)

    monkeypatch.setattr(PathList, "__getitem__", counted)
    rng = np.random.default_rng(0)
    of_split = np.flatnonzero(rng.random(4000) < 0.2)
    stats = storage.stats([f"{tmp_path}/{names[i]}" for i in of_split], skip=False)
    assert np.array_equal(stats.sizes, of_split)
    assert num_read < 10 * len(of_split) if num_near > 1 else num_read > 10 * len(of_split)
    shuffled = rng.permutation(4000)  # also backwards, and far away
    paths = [f"{tmp_path}/{names[i]}" for i in shuffled] + [f"{tmp_path}/none.png"]
    assert storage.stats(paths, skip=True).sizes.tolist() == [*shuffled.tolist(), -1]
