"""`test` and `validate` measure no image that was trained on: not one that moved, was renamed, copied or replaced."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import read
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from promise import promise

from finetune import ImageFolderData
from finetune.data.corrections import Correction, CorrectionsFile
from finetune.data.seen import build_record, continue_record, exclude_seen, fingerprint
from finetune.data.targets import ClassIndex


def write(root: Path, *names: str, size: int | None = None) -> Path:
    """Files that are not decoded, each with its own content, and of different sizes unless a size is passed."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        content = os.fsencode(f"{name} of {root} ")
        num = len(os.listdir(root)) + sum(root.name.encode() + os.fsencode(name))
        num_bytes = size or 100 + num
        (root / name).write_bytes((content * num_bytes)[:num_bytes])
    return root


def plain(root: Path, num: int = 30, **options) -> Path:
    return write(root, *(f"{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(num)), **options)


def with_test(root: Path) -> Path:
    """A train folder, and a test folder of ten other images."""
    names = [f"test/{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(100, 105)]
    return write(plain(root / "train").parent, *names)


def data(root: Path, **options) -> ImageFolderData:
    return read(ImageFolderData(str(root), num_workers=0, **options))


def checkpoint_of(data: ImageFolderData) -> dict:
    """What matters here of a checkpoint of a fit on this data."""
    seen = data.seen or build_record(data.splits["train"], data.splits.get("val"))
    return {"finetune": {"data_fingerprint": data.fingerprint, "seen": seen.pack()}}


def names(data: ImageFolderData, *splits: str) -> list[str]:
    paths = [path for split in splits if split in data.splits for path in data.splits[split].paths]
    return sorted(os.path.relpath(path, data.root) for path in paths)


def held(checkpoint: dict, data: ImageFolderData, split: str = "test", rank: int = 0) -> list[str]:
    """The names of what `test` or `validate` then measures."""
    exclude_seen(data, split, checkpoint, rank == 0)
    return names(data, split)


def go_on(checkpoint: dict, data: ImageFolderData) -> ImageFolderData:
    """The data of a fit that continues from a checkpoint."""
    continue_record(data, checkpoint)
    data.setup("fit")
    return data


@pytest.fixture
def lines(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO")
    return caplog


def copies(paths: Sequence[str], root: Path, name: str = "copy_{}.jpeg") -> Path:
    """The files under other names, in the folders of their classes."""
    for i, path in enumerate(paths):
        target = root / Path(path).parent.name / name.format(i)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return root


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "rename", "copy"]), st.integers(0, 2**16)),
    min_size=1,
    max_size=40,
)


@promise("unseen")
@given(size=st.integers(3, 20), changes=CHANGES, is_moved=st.booleans(), seed=st.integers(0, 2))
def test_whatever_happens_to_a_folder_all_images_but_the_trained_are_measured(
    size, changes, is_moved, seed
):
    with tempfile.TemporaryDirectory() as folder:
        root = plain(Path(folder) / "a", size)
        fitted = data(root)
        checkpoint = checkpoint_of(fitted)
        trained = {(root / name).read_bytes() for name in names(fitted, "train", "val")}
        for i, (change, number) in enumerate(changes):
            files = sorted(root.glob("*/*"))
            one = files[number % len(files)]
            if change == "add":
                write(root, f"{one.parent.name}/{500 + i}.png")
            elif change == "remove" and len(list(one.parent.iterdir())) > 1:
                one.unlink()
            elif change == "rename":
                one.rename(one.with_name(f"renamed {i}.png"))
            elif change == "copy":
                shutil.copy(one, one.with_name(f"copy {i}.png"))
        if is_moved:
            root = root.rename(root.with_name("moved"))
        here = {path.read_bytes() for path in root.glob("*/*")}
        try:
            measured = held(checkpoint, data(root, split_seed=seed))
        except ValueError as error:
            assert "has seen" in str(error) and here <= trained
        else:
            assert {(root / name).read_bytes() for name in measured} == here - trained


def test_the_folder_trained_on_gives_its_own_images(tmp_path, lines):
    fitted = data(plain(tmp_path / "a"))
    checkpoint = checkpoint_of(fitted)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    for split in ("test", "val"):
        expected = names(fitted, split)
        for name in ("a", "link", "copy"):
            lines.clear()
            assert held(checkpoint, data(tmp_path / name), split) == expected
            left_out, measured = lines.messages
            assert f"skipped {60 - len(expected)} of the 60 {split} images" in left_out
            assert (
                measured == f"{len(expected)} {split} images of {tmp_path / name} (not trained on)"
            )


def test_validation_may_be_measured_again_but_not_training(tmp_path):
    fitted = data(with_test(tmp_path / "a"))
    checkpoint = checkpoint_of(fitted)
    # also by other settings
    for options in ({}, {"val_fraction": 0.4}):
        measured = held(checkpoint, data(tmp_path / "a", **options), "val")
        assert measured and set(measured) <= set(names(fitted, "val"))


def forget_the_record(monkeypatch):
    monkeypatch.setattr("finetune.data.seen.read_record", lambda checkpoint: None)


def test_a_fold_is_tested_on_its_own_images(tmp_path):
    root = with_test(tmp_path / "set")
    fold = {"num_folds": 2, "fold": 1}
    fitted = data(root, **fold)
    assert held(checkpoint_of(fitted), data(root, **fold)) == names(fitted, "test")


def test_images_that_corrections_exclude_are_not_tested(tmp_path):
    root = plain(tmp_path / "set")
    usual = data(root)
    corrections = CorrectionsFile(tmp_path / "corrections.csv")
    for name in names(usual, "train", "val")[:5]:
        corrections.append(Correction(name, name.partition("/")[0], "excluded", "me", "now"))
    options = {"corrections": str(corrections.path)}
    checkpoint = checkpoint_of(data(root, **options))
    assert held(checkpoint, data(root, **options)) == names(usual, "test")


@pytest.mark.parametrize("suffix", [".bmp", ".tif", ".png"])
def test_images_that_differ_in_one_pixel_are_two(tmp_path, suffix):
    pixels = np.zeros((200, 200, 3), np.uint8)
    for name, column in (("train/cat/0", 20), ("train/dog/0", 60), ("test/cat/0", 120)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        one = pixels.copy()
        one[50, column] = 255
        Image.fromarray(one).save(tmp_path / f"{name}{suffix}")
    fitted = data(tmp_path, val_fraction=0.0)
    assert held(checkpoint_of(fitted), data(tmp_path)) == [f"test/cat/0{suffix}"]


@promise("unseen", controls=[forget_the_record])
@pytest.mark.parametrize("trained", ["train", "val"])
def test_training_images_in_a_test_folder_are_left_out(tmp_path, lines, trained):
    root = with_test(tmp_path / "a")
    fitted = data(root)
    checkpoint = checkpoint_of(fitted)
    before = names(data(root), "test")
    copies(fitted.splits[trained].paths[:3], root / "test")
    assert held(checkpoint, data(root)) == before
    assert "skipped 3 of the 13 test images" in lines.text and "copy_" in lines.text
    lines.clear()  # the other processes measure the same
    assert held(checkpoint, data(root), rank=1) == before and not lines.messages
    for place in (copies(fitted.splits[trained].paths, tmp_path / "b"), root / "train"):
        with pytest.raises(ValueError, match=r"has seen (\d+) of the \1 test images"):
            held(checkpoint, data(place))


@promise("unseen")
@pytest.mark.parametrize("split", ["test", "val"])
def test_another_folder_is_measured_whole(tmp_path, lines, split):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a", size=50_000)))
    plain(tmp_path / "others", 20, size=50_000)  # the same names and sizes, but not the same images
    other = data(tmp_path / "others")
    assert 0 < len(other.splits[split]) < 12
    assert len(held(checkpoint, other, split)) == 40 == len(other.splits[split])
    assert lines.messages == [f"40 {split} images of {tmp_path / 'others'} (all)"]
    assert np.bincount(other.splits[split].targets.labels).tolist() == [20, 20]
    # also where nothing was set apart from training
    apart = {"val_fraction": 0.0, "test_fraction": 0.0}
    assert len(held(checkpoint, data(plain(tmp_path / "d", 9), **apart), split)) == 18


def test_another_folder_with_splits_gives_its_own(tmp_path, lines):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    root = plain(tmp_path / "b/train").parent
    other = data(root)
    assert held(checkpoint, other, "test") == []
    with pytest.raises(ValueError, match=r"b has no test split.*--data\.root"):
        other.loader("test")
    write(root, "test/cat/1.png", "test/dog/1.png", "valid/dog/1.png")
    assert held(checkpoint, data(root)) == ["test/cat/1.png", "test/dog/1.png"]
    assert lines.messages[-1] == f"2 test images of {root} (its test split)"
    assert held(checkpoint, data(root), "val") == ["valid/dog/1.png"]


def test_a_checkpoint_without_a_record_excludes_nothing_and_says_so(tmp_path, lines):
    root = plain(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    record = checkpoint["finetune"]["seen"]
    for seen in ({name: digests[:0] for name, digests in record.items()}, None):
        checkpoint["finetune"]["seen"] = seen  # the first of images that are no files
        lines.clear()
        assert 0 < len(held(checkpoint, data(root))) < 20 and "not excluded" in lines.messages[-1]
    lines.clear()
    go_on(checkpoint, data(root))
    assert len(lines.messages) == 1 and "has no record" in lines.messages[0]


def test_what_earlier_parts_of_a_run_have_seen_stays_seen(tmp_path, lines):
    root = plain(tmp_path / "a")
    first, second = data(root, split_seed=3), data(root)
    before = checkpoint_of(first)
    path = Path(first.splits["train"].paths[0])
    (tmp_path / "cat").mkdir()
    replaced = Path(shutil.copy(path, tmp_path / "cat/replaced.png"))
    path.write_bytes(b"other")
    go_on(before, second)
    assert "have changed since this run began" in lines.text
    trained = {*names(first, "train"), *names(second, "train")}
    tested, validated = (
        held(checkpoint_of(second), data(root), split) for split in ("test", "val")
    )
    assert tested and not {*tested, *validated} & trained
    assert not {*tested} & {*names(first, "val"), *names(second, "val")}
    with pytest.raises(ValueError, match="has seen 1 of the 1 test images"):
        other = data(copies([str(replaced)], tmp_path / "b/test"), class_names=["cat", "dog"])
        held(checkpoint_of(second), other)


def test_the_record_is_small_and_safe_to_load(tmp_path):
    fitted = data(plain(tmp_path / "a"))
    torch.save(checkpoint_of(fitted), tmp_path / "some.ckpt")
    checkpoint = torch.load(tmp_path / "some.ckpt", weights_only=True)
    assert held(checkpoint, data(tmp_path / "a")) == names(fitted, "test")
    num_bytes = sum(digests.nbytes for digests in checkpoint["finetune"]["seen"].values())
    assert num_bytes == 8 * len(names(fitted, "train", "val"))


def test_the_fingerprint_sees_other_data_and_not_another_place(tmp_path):
    files = ("cat/1.png", os.fsdecode(b"cat/\xe9.png"), "dog/größe.png")

    def value(folder: str, *more: str, sizes: int = 1) -> str:
        root = write(tmp_path / folder, *files, *more, size=1)
        (root / files[0]).write_bytes(b"x" * sizes)
        return data(root, val_fraction=0, test_fraction=0).fingerprint

    here = value("here")
    assert here == value("elsewhere") and len(here) == 64
    assert here != value("one more", "cat/2.png") and here != value("another size", sizes=2)
    known = data(tmp_path / "here", val_fraction=0, test_fraction=0)
    train = known.splits["train"]
    assert fingerprint(train, None) == here != fingerprint(train, train)
    other = replace(train, targets=ClassIndex(np.array([0, 1, 1]), 2))
    assert fingerprint(other, None) != here


def test_images_of_a_group_that_was_trained_on_are_not_tested(tmp_path):
    """A group of one image is split by the image's name, and may move when it grows."""
    groups = [f"{name}/p{i} of {name}" for i in range(60) for name in ("a", "b")]
    root = write(tmp_path, *(f"{group}/1.png" for group in groups), "a/x/1.png", "a/x/2.png")
    before = data(root, group_by="folder")
    trained = {os.path.dirname(name) for name in names(before, "train", "val")}
    write(root, *(f"{group}/2.png" for group in groups))
    after = data(root, group_by="folder")
    # the control: without the exclusion some would be tested
    assert {os.path.dirname(name) for name in names(after, "test")} & trained
    tested = {os.path.dirname(name) for name in held(checkpoint_of(before), after)}
    assert tested and not tested & trained
