"""`test` and `validate` measure no image that was trained on: not one that moved, was renamed, copied or replaced."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import read
from hypothesis import given
from hypothesis import strategies as st
from promise import promise

from finetune import ImageFolderData
from finetune.data.contents import UNKNOWN
from finetune.data.samples import Samples
from finetune.data.seen import continue_record, exclude_seen
from finetune.data.seen_record import add_digests, fingerprint
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
    if data.seen.digests is None:
        seen = add_digests(data.seen, data.splits["train"], data.splits.get("val"))
        data.scanned = replace(data.scanned, seen=seen)
    finetune = {"data_fingerprint": data.fingerprint, "seen": data.seen.pack()}
    return {"finetune": finetune, "datamodule_hyper_parameters": dict(data.hparams)}


def unread(checkpoint: dict) -> dict:
    """The same of files whose content could not be read."""
    checkpoint["finetune"]["seen"]["digests"].fill_(UNKNOWN.view(np.int64))
    return checkpoint


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


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "rename"]), st.integers(0, 2**16)),
    min_size=1,
    max_size=40,
)


@promise("unseen")
@given(size=st.integers(3, 20), changes=CHANGES, is_moved=st.booleans())
def test_whatever_happens_to_a_folder_no_trained_image_is_measured(size, changes, is_moved):
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
        if is_moved:
            root = root.rename(root.with_name("moved"))
        try:
            measured = held(checkpoint, data(root))
        except ValueError as error:
            assert "has seen" in str(error)
        else:
            assert not {(root / name).read_bytes() for name in measured} & trained


@pytest.mark.parametrize("split", ["test", "val"])
def test_the_folder_trained_on_gives_its_own_images(tmp_path, lines, split):
    fitted = data(plain(tmp_path / "a"))
    expected, checkpoint = names(fitted, split), checkpoint_of(fitted)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    for name in ("a", "link", "copy"):
        lines.clear()
        assert held(checkpoint, data(tmp_path / name), split) == expected
        (line,) = lines.messages
        assert line.startswith(f"{len(expected)} {split} images of {tmp_path / name} (held out")


def test_changes_of_the_folder_are_reported(tmp_path, lines):
    root = plain(tmp_path / "a")
    fitted = data(root)
    checkpoint, before = checkpoint_of(fitted), names(fitted, "test")
    write(root, *(f"{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(30, 60)))
    train = sorted(fitted.splits["train"].paths)
    os.unlink(train[0])
    after = held(checkpoint, data(root))
    assert set(before) < set(after)
    assert "has changed since training: 1 image is gone, " in lines.text
    new = next(name for name in after if name not in before)
    shutil.move(train[1], root / new)  # what was trained on, under the name of a test image
    lines.clear()
    assert new not in held(checkpoint, data(root))
    assert f"skipped 1 of the {len(after)} test images" in lines.text and new in lines.text
    lines.clear()
    assert new in held(unread(checkpoint), data(root))
    assert "1 of the test images may be training images under other names" in lines.text


def test_images_that_are_all_renamed_in_place_are_no_new_ones(tmp_path, lines):
    root = plain(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    for path in sorted(root.glob("*/*")):
        path.rename(path.with_name(f"renamed_{path.name}"))
    # other ones are set apart now
    with pytest.raises(ValueError, match=r"has seen (\d+) of the \1 test images"):
        held(checkpoint, data(root))
    held(unread(checkpoint), data(root))
    assert "may be training images under other names" in lines.text
    assert "taken for a new data set" not in lines.text


@pytest.mark.parametrize(
    "options", [{"split_seed": 1}, {"test_fraction": 0.6}, {"val_fraction": 0.0}]
)
def test_other_splits_of_the_folder_trained_on_are_refused(tmp_path, options):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    with pytest.raises(ValueError, match=r"has seen \d+ of .*/a in training, .*png.*split_seed"):
        held(checkpoint, data(tmp_path / "a", **options))
    del checkpoint["finetune"]["seen"]  # control: only the record tells
    assert held(checkpoint, data(tmp_path / "a", **options))


def test_validation_may_be_measured_again_but_not_training(tmp_path):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    # the same part, by the rule
    assert held(checkpoint, data(tmp_path / "a", test_fraction=0.1), "val")
    with pytest.raises(ValueError, match="val images"):
        held(checkpoint, data(tmp_path / "a", val_fraction=0.4), "val")


def test_the_training_folder_itself_is_refused_also_if_it_is_called_test(tmp_path):
    root = with_test(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    assert len(held(checkpoint, data(root))) == 10
    with pytest.raises(ValueError, match="has seen"):
        held(checkpoint, data(root / "train"))
    shutil.rmtree(root / "test")
    (root / "train").rename(root / "test")
    with pytest.raises(ValueError, match="has seen 60 of the 60 test images"):
        held(checkpoint, data(root, class_names=["cat", "dog"]))


def forget_the_record(monkeypatch):
    monkeypatch.setattr("finetune.data.seen.read_record", lambda checkpoint: None)


@promise("unseen", controls=[forget_the_record])
def test_images_moved_from_training_into_the_test_folder(tmp_path):
    root = with_test(tmp_path / "a")
    fitted = data(root)
    checkpoint = checkpoint_of(fitted)
    name = os.path.relpath(fitted.splits["train"].paths[3], root / "train")
    shutil.move(root / "train" / name, root / "test" / name)
    with pytest.raises(ValueError, match=f"has seen 1 of the 11 test images.*/test/{name}"):
        held(checkpoint, data(root))


@promise("unseen")
@pytest.mark.parametrize("split", ["test", "val"])
def test_another_folder_is_measured_whole(tmp_path, lines, split):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    plain(tmp_path / "others", 20)  # the same names, but not the same images
    other = data(tmp_path / "others")
    assert 0 < len(other.splits[split]) < 12
    assert len(held(checkpoint, other, split)) == 40 == len(other.splits[split])
    assert lines.messages == [f"40 {split} images of {tmp_path / 'others'} (all)"]
    assert np.bincount(other.splits[split].targets.labels).tolist() == [20, 20]
    lines.clear()  # the other processes measure the same
    assert len(held(checkpoint, data(tmp_path / "others"), split, rank=1)) == 40
    assert not lines.messages
    # Also where nothing was set apart from training.
    apart = {"val_fraction": 0.0, "test_fraction": 0.0}
    checkpoint = checkpoint_of(data(plain(tmp_path / "c"), **apart))
    assert len(held(checkpoint, data(plain(tmp_path / "d", 9, size=50), **apart), split)) == 18


def test_another_folder_in_the_place_of_the_one_trained_on_is_measured_whole(tmp_path, lines):
    root = plain(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    without = {**checkpoint, "finetune": {"data_fingerprint": ""}}
    sizes = [path.stat().st_size for path in root.glob("*/*")]
    shutil.rmtree(root)
    # as `docker -v` may mount it
    write(root, *(f"{c}/new_{i:03d}.png" for c in ("cat", "dog") for i in range(20)))
    assert len(held(checkpoint, data(root))) == 40
    assert f"{root} has few of the images" in lines.text
    assert len(held(without, data(root))) < 20  # only the record tells
    shutil.rmtree(root)
    # by chance as large: each size once, of three times as many
    for i, size in enumerate(range(min(sizes), min(sizes) + 3 * len(sizes))):
        write(root, f"{('cat', 'dog')[i % 2]}/new_{i:03d}.png", size=size)
    assert len(held(checkpoint, data(root))) == 3 * len(sizes)


def test_another_folder_with_splits_gives_its_own(tmp_path, lines):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    root = plain(tmp_path / "b/train").parent
    other = data(root)
    assert held(checkpoint, other, "val") == []
    with pytest.raises(ValueError, match=r"b has no val split.*--data\.root"):
        other.loader("val")
    write(root, "test/cat/1.png", "test/dog/1.png", "valid/dog/1.png")
    assert held(checkpoint, data(root)) == ["test/cat/1.png", "test/dog/1.png"]
    assert lines.messages[-1] == f"2 test images of {root} (its test folder)"
    assert held(checkpoint, data(root), "val") == ["valid/dog/1.png"]


def test_a_checkpoint_without_a_record_excludes_nothing_and_says_so(tmp_path, lines):
    root = plain(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    record = unread(checkpoint)["finetune"]["seen"]
    record["names"], sizes = record["names"] + 1, record["sizes"]
    # of images that are no files
    record["sizes"] = torch.zeros_like(sizes)
    assert held(checkpoint, data(root, split_seed=1), "val")
    assert "not excluded" in lines.messages[-1]
    record["sizes"] = sizes  # the control: the same images with sizes
    assert held(checkpoint, data(root, split_seed=1), "val")
    assert "may be training images" in lines.text and "not excluded" not in lines.messages[-1]
    del checkpoint["finetune"]["seen"]
    assert 0 < len(held(checkpoint, data(root))) < 20 and "not excluded" in lines.messages[-1]
    lines.clear()
    go_on(checkpoint, data(root))
    assert len(lines.messages) == 1 and "has no record" in lines.messages[0]


def test_what_earlier_parts_of_a_run_have_seen_stays_seen(tmp_path, lines):
    root = plain(tmp_path / "a")
    first, second = data(root, split_seed=3), data(root)
    # the control
    assert set(names(first, "train")) & set(held(checkpoint_of(data(root)), data(root), "val"))
    go_on(checkpoint_of(first), second)
    assert "have changed since this run began" in lines.text
    for split, num in ("train", second.seen.num_train), ("val", len(second.seen.names)):
        for part in first, second:
            assert np.isin(part.splits[split].hashes(), second.seen.names[:num]).all()
    tested, validated = (
        held(checkpoint_of(second), data(root), split) for split in ("test", "val")
    )
    trained = {*names(first, "train"), *names(second, "train")}
    assert tested and not {*tested, *validated} & trained
    assert not {*tested} & {*names(first, "val"), *names(second, "val")}
    third = data(root, split_seed=3)
    seen = third.seen
    go_on(checkpoint_of(first), third)
    assert np.array_equal(third.seen.names, seen.names) and third.seen.num_train == seen.num_train


def test_the_record_is_small_and_safe_to_load(tmp_path):
    fitted = data(plain(tmp_path / "a"))
    torch.save(checkpoint_of(fitted), tmp_path / "some.ckpt")
    checkpoint = torch.load(tmp_path / "some.ckpt", weights_only=True)
    assert held(checkpoint, data(tmp_path / "a")) == names(fitted, "test")
    seen = checkpoint["finetune"]["seen"]
    num_bytes = sum(seen[name].nbytes for name in ("names", "sizes", "digests"))
    assert num_bytes == 20 * len(names(fitted, "train", "val"))


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
    assert fingerprint(known.seen, train, None) == here != fingerprint(known.seen, train, train)
    other = replace(train, targets=ClassIndex(np.array([0, 1, 1]), 2))
    assert fingerprint(known.seen, other, None) != here


# Copies


def copies(split: Samples, root: Path, name: str = "{}.png") -> Path:
    """The files of a split under other names, in the folders of their classes."""
    for i, path in enumerate(split.paths):
        target = root / Path(path).parent.name / name.format(i)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return root


@pytest.mark.parametrize(
    ("trained", "split"), [("train", "test"), ("val", "test"), ("train", "val")]
)
def test_copies_elsewhere_under_other_names_are_refused(tmp_path, trained, split):
    fitted = data(plain(tmp_path / "a"))
    checkpoint, num = checkpoint_of(fitted), len(fitted.splits[trained])
    other = copies(fitted.splits[trained], tmp_path / "other", "copy_{}.jpeg")
    with pytest.raises(ValueError, match=f"has seen {num} of the {num} {split} .*{other}.*copy"):
        held(checkpoint, data(other), split)
    assert held(unread(checkpoint), data(other), split)  # control: only the digests tell


def forget_the_digests(monkeypatch):
    monkeypatch.setattr("finetune.data.seen.exclude_copies", lambda *_, **__: None)


@promise("unseen", controls=[forget_the_digests])
def test_copies_among_new_images_are_left_out(tmp_path, lines):
    fitted = data(plain(tmp_path / "a"))
    checkpoint, num = checkpoint_of(fitted), len(fitted.splits["train"])
    other = copies(fitted.splits["train"], tmp_path / "b/test", "copy_{}.jpeg").parent
    copies(fitted.splits["test"], other / "test", "unseen_{}.png")
    write(other, *(f"test/{c}/new_{i}.png" for c in ("cat", "dog") for i in range(5)))
    copies(fitted.splits["train"], other / "train")
    left = held(checkpoint, data(other))
    assert len(left) == 10 + len(fitted.splits["test"]) and not any("copy" in name for name in left)
    assert f"skipped {num} of the {num + len(left)} test images of {other}" in lines.messages[0]
    lines.clear()
    assert held(checkpoint, data(other), rank=1) == left and not lines.messages


def test_a_test_folder_of_nothing_but_training_images_is_refused(tmp_path):
    root = with_test(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    assert len(held(checkpoint, data(root))) == 10  # the control
    same = Path(shutil.copytree(root, tmp_path / "same"))
    shutil.rmtree(same / "test")
    shutil.copytree(same / "train", same / "test")
    with pytest.raises(ValueError, match="has seen 60 of the 60 test images .*copies"):
        held(checkpoint, data(same))


def test_a_few_copies_under_their_old_names_make_no_training_folder(tmp_path, lines):
    fitted = data(plain(tmp_path / "a"))
    checkpoint = checkpoint_of(fitted)
    other = write(tmp_path / "b", *(f"{c}/new_{i}.png" for c in ("cat", "dog") for i in range(20)))
    for path in fitted.splits["train"].paths[:3]:
        shutil.copy(path, other / Path(path).parent.name)
    left = held(checkpoint, data(other))
    # measured whole, without the copies
    assert len(left) == 40 and all("new" in name for name in left)
    assert f"skipped 3 of the 43 test images of {other}" in lines.text


def test_copies_within_the_folder_trained_on_are_counted(tmp_path, lines):
    root = with_test(tmp_path / "a")
    fitted = data(root)
    shutil.copyfile(fitted.splits["train"].paths[0], root / "test/cat/other.png")
    assert len(held(checkpoint_of(fitted), data(root))) == 11
    assert f"1 of the 11 test images of {root} are copies" in lines.text
    lines.clear()
    assert len(held(unread(checkpoint_of(fitted)), data(root))) == 11
    assert "are copies" not in lines.text


def test_numbered_files_of_one_size_are_told_apart_by_content(tmp_path):
    # as uncompressed images are
    checkpoint = checkpoint_of(data(plain(tmp_path / "a", size=50_000)))
    assert len(held(checkpoint, data(plain(tmp_path / "b", size=50_000)))) == 60
    # control: taken for the folder trained on
    assert len(held(unread(checkpoint), data(tmp_path / "b"))) < 15


def test_what_was_replaced_before_a_fit_went_on_stays_seen(tmp_path):
    first = data(plain(tmp_path / "a"))
    checkpoint, path = checkpoint_of(first), Path(first.splits["train"].paths[0])
    before = path.read_bytes()
    path.write_bytes(b"other" + before[5:])
    second = data(tmp_path / "a")
    checkpoint_of(second)
    go_on(checkpoint, second)
    for i, content in enumerate((before, path.read_bytes())):
        copy = tmp_path / f"copy_{i}/cat/some.png"
        copy.parent.mkdir(parents=True)
        copy.write_bytes(content)
        with pytest.raises(ValueError, match="has seen 1 of the 1 test images"):
            held(checkpoint_of(second), data(tmp_path / f"copy_{i}", class_names=["cat", "dog"]))


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
