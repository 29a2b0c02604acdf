"""The facts about files that need no reading are queried once, and how files are opened."""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from colours import QUICKEST
from memory_storage import PLACE, MemoryStorage

from finetune import Classifier, ImageFolderData
from finetune.data import image_cache
from finetune.data.checking.first_look import first_look
from finetune.data.checking.image_facts import inspect_image
from finetune.data.datasets.listing import list_images
from finetune.data.image_cache import read_from_cache
from finetune.data.prediction_paths import files_to_predict
from finetune.data.seen_record import add_digests
from finetune.data.storage import (
    STORAGES,
    concatenate_stats,
    file_stats,
    files_digest,
    open_file,
)


@pytest.fixture
def digest(tmp_path) -> Callable[..., str]:
    """The digest of files of three bytes in a folder `one`, or of others."""
    (tmp_path / "one").mkdir()
    for name in "ab":
        (tmp_path / "one" / name).write_bytes(b"123")
        os.utime(tmp_path / "one" / name, (5, 5))

    def digest(names: str = "ab", root: str = "one") -> str:
        paths = [str(tmp_path / root / name) for name in names]
        return files_digest(paths, file_stats(paths), tmp_path / root)

    return digest


def test_name_size_time_and_order_of_the_files_make_the_digest_and_their_folder_does_not(
    tmp_path, digest
):
    first = digest()
    found = {first, digest("ba"), digest("a"), digest("ac")}  # c is not there
    os.rename(tmp_path / "one", tmp_path / "two")
    assert digest(root="two") == first
    os.utime(tmp_path / "two/a", (5, 6))
    found.add(digest(root="two"))
    (tmp_path / "two/a").write_bytes(b"1234")
    os.utime(tmp_path / "two/a", (5, 5))
    found.add(digest(root="two"))
    assert len(found) == 6


@pytest.mark.parametrize("how", ["written over", "put in its place", "swapped"])
def test_a_file_replaced_by_one_of_its_size_and_time_is_noticed(tmp_path, digest, how):
    first, other = digest(), tmp_path / "one/b"
    path = tmp_path / "one/a"
    time.sleep(0.02)  # the file system's clock ticks a hundred times a second or more
    if how == "swapped":
        os.rename(path, tmp_path / "c")
        os.rename(other, path)
        os.rename(tmp_path / "c", other)
    else:
        target = path if how == "written over" else tmp_path / "new"
        target.write_bytes(b"456")
        os.utime(target, (5, 5))
        os.replace(target, path)
    assert (path.stat().st_size, path.stat().st_mtime) == (3, 5)  # the control: these say nothing
    assert digest() != first


def test_to_read_a_file_changes_nothing(tmp_path, digest):
    first = digest()
    time.sleep(0.02)
    (tmp_path / "one/a").read_bytes()
    list((tmp_path / "one").iterdir())
    (tmp_path / "one/c").touch()  # next to them
    assert digest() == first


def test_what_is_known_of_files_folders_and_what_is_not_there(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    os.utime(tmp_path / "file", ns=(3, 7))
    paths = [str(tmp_path / name) for name in ("file", "folder", "pipe", "gone")]
    stats = file_stats(paths)
    assert stats.sizes.tolist()[::3] == [5, -1]
    assert stats.is_regular.tolist() == [True, False, False, False]
    assert stats.times[0].tolist() == [7, os.stat(paths[0]).st_ctime_ns]
    assert stats.times[3].tolist() == [-1, -1]
    rows = np.array([3, 0])
    assert stats.take(rows).sizes.tolist() == [-1, 5]
    both = concatenate_stats([stats.take(rows), stats])
    assert both.sizes.tolist() == [-1, 5, *stats.sizes] and both.times.shape == (6, 2)
    with pytest.raises(FileNotFoundError) as caught:
        file_stats(paths, skip=False)
    assert caught.value.filename == paths[3]


def test_a_pipe_is_refused_at_once_and_a_folder_by_its_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a pipe"):
        open_file(tmp_path / "pipe")
    with pytest.raises(OSError) as caught:
        open_file(tmp_path)
    assert caught.value.filename == str(tmp_path)
    (tmp_path / "file").write_bytes(b"12345")
    with open_file(tmp_path / "file") as file:
        assert file.read() == b"12345"


@pytest.fixture
def asked(monkeypatch) -> Counter[str]:
    """How often the file system is asked for each file, by its path."""
    counts: Counter[str] = Counter()
    for name in ("stat", "lstat"):
        ask = getattr(os, name)

        def counted(path, *args, ask=ask, **options):
            counts[os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""] += 1
            return ask(path, *args, **options)

        monkeypatch.setattr(os, name, counted)
    return counts


def test_each_file_is_asked_for_once_before_training(colours, cli, monkeypatch, asked):
    monkeypatch.setattr(image_cache, "_MIN_SAVED", 0)  # so that a cache is built
    before: list[Counter[str]] = []
    step = Classifier.training_step

    def first_step(*args):
        before.append(Counter(asked))
        return step(*args)

    monkeypatch.setattr(Classifier, "training_step", first_step)
    cli("fit", "--data.root", colours, *QUICKEST, "--trainer.max_epochs", 3)
    files = [str(path) for path in Path(colours).rglob("*.png")]
    assert len(files) == 90
    assert {before[0][path] for path in files} == {1}


def test_control_files_that_are_not_listed_with_stats_are_asked_for_again(colours, asked):
    samples = ImageFolderData(str(colours)).splits["train"]
    path = samples.paths[0]
    assert asked[path] == 1
    samples.load_stats()
    assert asked[path] == 1
    replace(samples, stats=None).load_stats()
    assert asked[path] == 2


def test_a_second_kind_of_storage_needs_no_other_change(colours, tmp_path, monkeypatch):
    """Images in it are found, split, recorded, cached, checked and predicted as the same images on a disk."""
    with pytest.raises(
        FileNotFoundError, match="does not exist"
    ):  # the control: no folder of the disk
        ImageFolderData(PLACE).read()
    storage = MemoryStorage(colours)
    monkeypatch.setitem(STORAGES, "memory", storage)
    here = ImageFolderData(str(colours), image_size=24, num_workers=0)
    there = ImageFolderData(PLACE, image_size=24, num_workers=0)
    assert there.class_names == here.class_names and there.fingerprint == here.fingerprint
    paths = [path for part in there.splits.values() for path in part.paths]
    assert sorted(paths) == sorted(storage.files)
    digests = [
        add_digests(data.seen, data.splits["train"], data.splits["val"]).digests
        for data in (here, there)
    ]
    assert np.array_equal(*digests) and digests[0].all()
    cached = read_from_cache(there.splits, PLACE, 1, build=True)
    assert set(cached) == {"train", "val"}
    for split, part in here.splits.items():
        assert list(part.names()) == list(there.splits[split].names())
        for samples in (there.splits[split], cached.get(split, part)):
            assert np.array_equal(samples.read(3), part.read(3))
    listing = list_images(PLACE)
    assert np.array_equal(listing.counts(), list_images(colours).counts())
    first = listing.paths[0]
    last = listing.paths[len(listing.paths) - 1]
    facts = inspect_image(first)
    assert (facts.error, facts.num_bytes) == ("", len(storage.files[first]))
    assert not first_look(there.splits, there.class_names, PLACE).line()
    table = tmp_path / "x.csv"
    table.write_text(f"path,label\n{first},cat\n{last},dog\n")
    with pytest.raises(ValueError, match="is an address outside of the folder"):
        ImageFolderData(table=str(table)).read()  # a table chooses no server
    of_table = ImageFolderData(PLACE, table=str(table), test_fraction=0, val_fraction=0)
    assert list(of_table.splits["train"].paths) == [first, last]
    assert len(files_to_predict(f"{PLACE}/test")) == 30
