"""Images seen in training are not measured as new: images added, removed, renamed, moved, and other folders."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from colours import QUICKEST
from data_files import read
from promise import promise

from finetune.data.contents import UNKNOWN
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.samples import Samples
from finetune.data.seen import continue_record, exclude_seen
from finetune.data.seen_record import add_digests, fingerprint
from finetune.data.targets import ClassIndex


def write(root: Path, *names: str, size: int | None = None) -> Path:
    """Files that are not decoded, each with its own content, and of different sizes unless a size is passed."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        content = os.fsencode(f"{name} of {root} ")
        num_bytes = size or 100 + len(os.listdir(root)) + sum(
            root.name.encode() + os.fsencode(name)
        )
        (root / name).write_bytes((content * num_bytes)[:num_bytes])
    return root


def plain(root: Path, num: int = 30, **options) -> Path:
    return write(root, *(f"{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(num)), **options)


def data(root: Path, **options) -> ImageFolderData:
    return read(ImageFolderData(str(root), num_workers=0, **options))


def checkpoint_of(data: ImageFolderData) -> dict:
    """What matters here of a checkpoint of a fit on this data, once through a file."""
    if data.seen.digests is None:
        seen = add_digests(data.seen, data.splits["train"], data.splits.get("val"))
        data.scanned = replace(data.scanned, seen=seen)
    finetune = {"data_fingerprint": data.fingerprint, "seen": data.seen.pack()}
    return {"finetune": finetune, "datamodule_hyper_parameters": dict(data.hparams)}


def unread(checkpoint: dict) -> dict:
    """The same of files whose content could not be read."""
    checkpoint["finetune"]["seen"]["digests"].fill_(UNKNOWN.view(np.int64))
    return checkpoint


def held(
    checkpoint: dict, data: ImageFolderData, command: str = "test", rank: int = 0
) -> list[str]:
    """The names of what `command` then measures."""
    split = {"validate": "val"}.get(command, command)
    if command == "fit":
        continue_record(data, checkpoint, rank == 0)
        data.setup("fit")
    else:
        exclude_seen(data, split, checkpoint, rank == 0)
    part = data.splits.get(split)
    return sorted(os.path.relpath(path, data.root) for path in part.paths) if part else []


@pytest.fixture
def lines(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO")
    return caplog


def test_the_folder_trained_on_gives_its_own_test_images(tmp_path, lines):
    fitted = data(plain(tmp_path / "a"))
    expected = {
        s: sorted(os.path.relpath(path, tmp_path / "a") for path in fitted.splits[s].paths)
        for s in ("val", "test")
    }
    checkpoint = checkpoint_of(fitted)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    for name in ("a", "link", "copy"):
        for command, split in ("test", "test"), ("validate", "val"):
            lines.clear()
            assert held(checkpoint, data(tmp_path / name), command) == expected[split]
            (line,) = lines.messages
            assert (
                line
                == f"{len(expected[split])} {split} images of {tmp_path / name} (held out of training)"
            )


def test_images_added_removed_and_renamed(tmp_path, lines):
    root = plain(tmp_path / "a")
    fitted = data(root)
    checkpoint, was_seen = (
        checkpoint_of(fitted),
        {p for s in ("train", "val") for p in fitted.splits[s].paths},
    )
    before = held(checkpoint, data(root))
    write(root, *(f"{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(30, 60)))
    (root / before[0]).unlink()
    gone = sorted(fitted.splits["train"].paths)[0]
    os.unlink(gone)
    lines.clear()
    after = held(checkpoint, data(root))
    assert set(before[1:]) < set(after) and not was_seen & {str(root / name) for name in after}
    assert any("has changed since training: 1 image is gone, " in line for line in lines.messages)
    new = next(name for name in after if name not in before)
    source = sorted(fitted.splits["train"].paths)[1]
    # under the name of a test image: what was trained on, and is gone there
    shutil.move(source, root / new)
    lines.clear()
    assert new not in held(checkpoint, data(root))
    assert any(
        line.startswith("skipped 1 of the") and str(root / new) in line for line in lines.messages
    )
    lines.clear()
    assert new in held(unread(checkpoint), data(root))
    assert any(
        "1 of the test images may be training images under other names" in line
        for line in lines.messages
    )


@pytest.mark.parametrize(
    "options", [{"split_seed": 1}, {"test_fraction": 0.6}, {"val_fraction": 0.0}]
)
def test_other_parts_of_the_folder_trained_on_are_refused(tmp_path, options):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    with pytest.raises(
        ValueError,
        match=r"has seen \d+ of the \d+ test images of .*/a in training, .*png.*split_seed",
    ):
        held(checkpoint, data(tmp_path / "a", **options))
    del checkpoint["finetune"]["seen"]  # control: only the record tells
    assert held(checkpoint, data(tmp_path / "a", **options))


def test_validation_may_be_measured_again_but_not_training(tmp_path):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    # the same part, by the rule
    assert held(checkpoint, data(tmp_path / "a", test_fraction=0.1), "validate")
    with pytest.raises(ValueError, match="val images"):
        held(checkpoint, data(tmp_path / "a", val_fraction=0.4), "validate")


def test_the_training_folder_itself_is_refused(tmp_path):
    root = plain(tmp_path / "a/train").parent
    write(root, *(f"test/{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(5)))
    checkpoint = checkpoint_of(data(root))
    assert len(held(checkpoint, data(root))) == 10
    with pytest.raises(ValueError, match="has seen"):
        held(checkpoint, data(root / "train"))


@promise("unseen")
def test_images_moved_from_training_into_the_test_folder(tmp_path):
    root = plain(tmp_path / "a/train").parent
    write(root, *(f"test/{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(100, 105)))
    fitted = data(root)
    checkpoint = checkpoint_of(fitted)
    name = os.path.relpath(fitted.splits["train"].paths[3], root / "train")
    shutil.move(root / "train" / name, root / "test" / name)
    with pytest.raises(ValueError, match=f"has seen 1 of the 11 test images.*/test/{name}"):
        held(checkpoint, data(root))


@promise("unseen")
@pytest.mark.parametrize("command", ["test", "validate"])
def test_another_folder_is_measured_whole(tmp_path, lines, command):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    plain(tmp_path / "others", 20)  # the same names, but not the same images
    other = data(tmp_path / "others")
    split = {"validate": "val"}.get(command, command)
    assert 0 < len(other.splits[split]) < 12
    assert len(held(checkpoint, other, command)) == 40 == len(other.splits[split])
    assert lines.messages == [f"40 {split} images of {tmp_path / 'others'} (all)"]
    assert np.bincount(other.splits[split].targets.labels).tolist() == [20, 20]
    # Also where nothing was set apart from training.
    apart = {"val_fraction": 0.0, "test_fraction": 0.0}
    checkpoint = checkpoint_of(data(plain(tmp_path / "c"), **apart))
    assert (
        len(held(checkpoint, data(plain(tmp_path / "d", num=9, size=50), **apart), command)) == 18
    )


def test_another_folder_in_the_place_of_the_one_trained_on_is_measured_whole(tmp_path, lines):
    root = plain(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    without = {**checkpoint, "finetune": {"data_fingerprint": ""}}
    shutil.rmtree(root)
    # as `docker -v` may mount it
    write(root, *(f"{c}/new_{i:03d}.png" for c in ("cat", "dog") for i in range(20)))
    assert len(held(checkpoint, data(root))) == 40
    assert (
        f"{root} has few of the images that this checkpoint was trained on: taken for a new data set"
        in lines.messages
    )
    lines.clear()
    assert len(held(checkpoint, data(root), rank=1)) == 40 and not lines.messages
    assert len(held(without, data(root))) < 20  # only the record tells


def test_files_that_are_by_chance_as_large_are_not_the_ones_trained_on(tmp_path, lines):
    root = plain(tmp_path / "a", 30)
    checkpoint = checkpoint_of(data(root))
    sizes = [path.stat().st_size for path in root.glob("*/*")]
    shutil.rmtree(root)
    # each size once, of two times as many
    for i, size in enumerate(range(min(sizes), min(sizes) + 3 * len(sizes))):
        write(root, f"{('cat', 'dog')[i % 2]}/new_{i:03d}.png", size=size)
    assert 2 * len(set(sizes) & {path.stat().st_size for path in root.glob("*/*")}) >= len(
        set(sizes)
    )
    assert len(held(checkpoint, data(root))) == 3 * len(sizes)
    assert "taken for a new data set" in lines.text


def test_images_that_are_all_renamed_in_place_are_no_new_ones(tmp_path, lines):
    root = plain(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    for path in sorted(root.glob("*/*")):
        path.rename(path.with_name(f"renamed_{path.name}"))
    # other ones are set apart now
    with pytest.raises(ValueError, match=r"has seen (\d+) of the \1 test images"):
        held(checkpoint, data(root))
    assert "taken for a new data set" not in lines.text
    lines.clear()
    held(unread(checkpoint), data(root))
    assert "may be training images under other names: they are equal in size" in lines.text
    assert "taken for a new data set" not in lines.text


def test_the_training_folder_called_test_is_refused(tmp_path):
    root = plain(tmp_path / "a/train").parent
    checkpoint = checkpoint_of(data(root))
    (root / "train").rename(root / "test")
    with pytest.raises(ValueError, match="has seen 60 of the 60 test images"):
        held(checkpoint, data(root, class_names=["cat", "dog"]))


def test_another_folder_with_splits_gives_its_own(tmp_path, lines):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    root = plain(tmp_path / "b/train").parent
    with pytest.raises(ValueError, match=r"b has no val split.*--data\.root"):
        other = data(root)
        assert held(checkpoint, other, "validate") == []
        other.trainer = SimpleNamespace(state=SimpleNamespace(fn="validate"))
        other.val_dataloader()
    write(root, "test/cat/1.png", "test/dog/1.png", "valid/dog/1.png")
    assert held(checkpoint, data(root)) == ["test/cat/1.png", "test/dog/1.png"]
    assert lines.messages[-1] == f"2 test images of {root} (its test folder)"
    assert held(checkpoint, data(root), "validate") == ["valid/dog/1.png"]
    assert lines.messages[-1] == f"1 val image of {root} (its valid folder)"


def test_a_class_too_small_for_its_parts_loses_images_but_no_truth(tmp_path, lines):
    root = plain(tmp_path / "a", 4)
    fitted = data(root)
    checkpoint, was_seen = (
        checkpoint_of(fitted),
        {p for s in ("train", "val") for p in fitted.splits[s].paths},
    )
    for path in [p for p in fitted.splits["test"].paths if "/cat/" in p]:
        os.unlink(path)
    now = data(root)
    assert was_seen & set(now.splits["test"].paths)  # the rule fills the part of cats up
    names = held(checkpoint, now)
    assert names and not was_seen & {str(root / name) for name in names}
    assert any(re.search("skipped 1 of the . test images", line) for line in lines.messages)
    assert len(now.splits["test"]) == len(names)


def test_all_processes_measure_the_same(tmp_path, lines):
    checkpoint = checkpoint_of(data(plain(tmp_path / "a")))
    plain(tmp_path / "b")
    for root in ("a", "b"):
        first = held(checkpoint, data(tmp_path / root))
        lines.clear()
        assert held(checkpoint, data(tmp_path / root), rank=1) == first and not lines.messages


def test_a_checkpoint_without_the_record(tmp_path, lines):
    root = plain(tmp_path / "a")
    checkpoint = checkpoint_of(data(root))
    del checkpoint["finetune"]["seen"]
    assert 0 < len(held(checkpoint, data(root))) < 20 and "not excluded" in lines.messages[-1]
    lines.clear()
    fit = data(root)
    held(checkpoint, fit, "fit")
    assert len(lines.messages) == 1 and "has no record" in lines.messages[0]


def test_what_earlier_parts_of_a_run_have_seen_stays_seen(tmp_path, lines):
    root = plain(tmp_path / "a")
    first = data(root, split_seed=3)
    second = data(root)
    held(checkpoint_of(first), second, "fit")
    assert "have changed since this run began" in lines.text
    for split, num in ("train", second.seen.num_train), ("val", len(second.seen.names)):
        for part in first, second:
            assert np.isin(part.splits[split].hashes(), second.seen.names[:num]).all()
    names = {str(root / name) for name in held(checkpoint_of(second), data(root))}
    assert names and not any(
        names & set(part.splits[s].paths) for part in (first, second) for s in ("train", "val")
    )
    assert "skipped" in lines.text
    third = data(root, split_seed=3)
    seen = third.seen
    held(checkpoint_of(first), third, "fit")
    assert np.array_equal(third.seen.names, seen.names)  # nothing new
    assert third.seen.num_train == seen.num_train


def test_the_record_is_small_and_safe_to_load(tmp_path):
    fitted = data(plain(tmp_path / "a"))
    torch.save(checkpoint_of(fitted), tmp_path / "some.ckpt")
    checkpoint = torch.load(tmp_path / "some.ckpt", weights_only=True)
    assert held(checkpoint, data(tmp_path / "a"))
    seen = checkpoint["finetune"]["seen"]
    assert sum(seen[name].nbytes for name in ("names", "sizes", "digests")) == 20 * sum(
        len(fitted.splits[split]) for split in ("train", "val")
    )


def test_the_fingerprint_sees_other_data_and_not_another_place(tmp_path):
    names = ("cat/1.png", os.fsdecode(b"cat/\xe9.png"), "dog/größe.png")

    def value(folder: str, *more: str, sizes: int = 1) -> str:
        root = write(tmp_path / folder, *names, *more, size=1)
        (root / names[0]).write_bytes(b"x" * sizes)
        return data(root, val_fraction=0, test_fraction=0).fingerprint

    here = value("here")
    assert here == value("elsewhere") and len(here) == 64
    assert here != value("one more", "cat/2.png")
    assert here != value("another size", sizes=2)
    known = data(tmp_path / "here", val_fraction=0, test_fraction=0)
    train = known.splits["train"]
    assert fingerprint(known.seen, train, None) == here != fingerprint(known.seen, train, train)
    other = replace(train, targets=ClassIndex(np.array([0, 1, 1]), 2))
    assert fingerprint(known.seen, other, None) != here


def test_a_record_without_files_says_nothing(tmp_path, lines):
    """As of images that are no files."""
    fitted = data(plain(tmp_path / "a"))
    checkpoint = checkpoint_of(fitted)
    record = unread(checkpoint)["finetune"]["seen"]
    record["names"] = record["names"] + 1
    sizes = record["sizes"]
    record["sizes"] = torch.zeros_like(sizes)
    other = data(tmp_path / "a", split_seed=1)
    assert held(checkpoint, other, "validate")
    assert "has no record of its training images: they are not excluded" in lines.messages[-1]
    # the control: the same images with sizes, none of which has its name
    record["sizes"] = sizes
    assert held(checkpoint, data(tmp_path / "a", split_seed=1), "validate")
    assert "may be training images under other names" in lines.text
    assert "not excluded" not in lines.messages[-1]


def copies(split: Samples, root: Path, name: str = "{}.png") -> Path:
    """The files of a split under other names, in the folders of their classes."""
    for i, path in enumerate(split.paths):
        target = root / Path(path).parent.name / name.format(i)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return root


@pytest.mark.parametrize(
    ("split", "command"), [("train", "test"), ("val", "test"), ("train", "validate")]
)
def test_copies_elsewhere_under_other_names_are_refused(tmp_path, split, command):
    fitted = data(plain(tmp_path / "a"))
    checkpoint, num = checkpoint_of(fitted), len(fitted.splits[split])
    other = copies(fitted.splits[split], tmp_path / "other", "copy_{}.jpeg")
    name = {"validate": "val"}.get(command, command)
    with pytest.raises(
        ValueError,
        match=f"has seen {num} of the {num} {name} images of {other} in training: .*copy",
    ):
        held(checkpoint, data(other), command)
    assert held(unread(checkpoint), data(other), command)  # control: only the digests tell


@promise("unseen")
def test_copies_among_new_images_are_left_out(tmp_path, lines):
    fitted = data(plain(tmp_path / "a"))
    checkpoint, num = checkpoint_of(fitted), len(fitted.splits["train"])
    other = copies(fitted.splits["train"], tmp_path / "b/test", "copy_{}.jpeg").parent
    copies(fitted.splits["test"], other / "test", "unseen_{}.png")
    write(other, *(f"test/{c}/new_{i}.png" for c in ("cat", "dog") for i in range(5)))
    copies(fitted.splits["train"], other / "train")
    left = held(checkpoint, data(other))
    assert len(left) == 10 + len(fitted.splits["test"]) and not any("copy" in name for name in left)
    assert lines.messages[0].startswith(
        f"skipped {num} of the {num + len(left)} test images of {other}: copies of "
    )
    lines.clear()
    assert held(checkpoint, data(other), rank=1) == left and not lines.messages


def test_a_test_folder_of_nothing_but_training_images_is_refused(tmp_path):
    fitted = data(
        write(
            tmp_path / "a",
            *(f"{s}/{c}/{i}.png" for s in ("train", "test") for c in "xy" for i in range(20)),
        )
    )
    checkpoint = checkpoint_of(fitted)
    assert len(held(checkpoint, data(tmp_path / "a"))) == 40  # the control
    same = Path(shutil.copytree(tmp_path / "a", tmp_path / "same"))
    shutil.rmtree(same / "test")
    shutil.copytree(same / "train", same / "test")
    with pytest.raises(
        ValueError, match="has seen 40 of the 40 test images of .* in training: they are copies"
    ):
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
    assert f"skipped 3 of the 43 test images of {other}: copies of " in lines.text
    lines.clear()
    moved = (tmp_path / "a").rename(tmp_path / "moved")  # the control
    assert len(held(checkpoint, data(moved))) == len(fitted.splits["test"])


def test_copies_within_the_folder_trained_on_are_counted(tmp_path, lines):
    root = plain(tmp_path / "a/train").parent
    write(root, *(f"test/{c}/{i:03d}.png" for c in ("cat", "dog") for i in range(100, 105)))
    fitted = data(root)
    shutil.copyfile(fitted.splits["train"].paths[0], root / "test/cat/other.png")
    assert len(held(checkpoint_of(fitted), data(root))) == 11
    assert (
        f"1 of the 11 test images of {root} are copies of images seen in training, such as {root}/test/cat"
        in lines.text
    )
    lines.clear()
    assert (
        len(held(unread(checkpoint_of(fitted)), data(root))) == 11
        and "are copies" not in lines.text
    )


def test_numbered_files_of_one_size_are_distinguished_by_content(tmp_path, lines):
    # as uncompressed images are
    checkpoint = checkpoint_of(data(plain(tmp_path / "a", size=50_000)))
    assert len(held(checkpoint, data(plain(tmp_path / "b", size=50_000)))) == 60
    assert lines.messages == [f"60 test images of {tmp_path / 'b'} (all)"]
    # control: taken for the folder trained on
    assert len(held(unread(checkpoint), data(tmp_path / "b"))) < 15


def test_what_was_replaced_before_a_fit_went_on_stays_seen(tmp_path):
    first = data(plain(tmp_path / "a"))
    checkpoint, path = checkpoint_of(first), Path(first.splits["train"].paths[0])
    before = path.read_bytes()
    path.write_bytes(b"other" + before[5:])
    second = data(tmp_path / "a")
    checkpoint_of(second)
    held(checkpoint, second, "fit")
    for i, content in enumerate((before, path.read_bytes())):
        copy = tmp_path / f"copy_{i}/cat/some.png"
        copy.parent.mkdir(parents=True)
        copy.write_bytes(content)
        with pytest.raises(ValueError, match="has seen 1 of the 1 test images"):
            held(checkpoint_of(second), data(tmp_path / f"copy_{i}", class_names=["cat", "dog"]))


@pytest.mark.slow
def test_test_of_a_run_after_images_were_added(colours, cli, tmp_path, capsys, caplog):
    root = shutil.copytree(colours / "train", tmp_path / "photos")
    cli("fit", "--data.root", root, *QUICKEST)
    fitted = data(root)
    expected = len(fitted.splits["test"])
    for name in ("blue", "green", "red"):
        for i in range(10):
            shutil.copy(colours / f"test/{name}/{i:02d}.png", root / name / f"{20 + i}.png")
    capsys.readouterr()
    test = [
        "test",
        "--ckpt_path",
        "runs/fit/version_0/checkpoints/best.ckpt",
        "--trainer.accelerator",
        "cpu",
    ]
    cli(*test)
    line = re.search(r"(\d+) test images of .*photos \(held out of training\)", caplog.text)
    assert int(line[1]) == len(data(root).splits["test"]) > expected
    with pytest.raises(ValueError, match="this checkpoint has seen"):
        cli(*test, "--data.split_seed", 5)
    cli(*test, "--data.root", colours / "test")
    assert re.search(r"30 test images of .*/test \(all\)", caplog.text)
    other = copies(fitted.splits["train"], tmp_path / "other/test", "copy_{}.png").parent
    with pytest.raises(
        ValueError,
        match=r"has seen (\d+) of the \1 test images of .*/other in training: .*copies",
    ):
        cli(*test, "--data.root", other)
    two = tmp_path / "two"
    for name in ("blue", "red"):
        shutil.copytree(colours / "test" / name, two / name)
    cli(*test, "--data.root", two)
    assert re.search(r"20 test images of .*/two \(all\)", caplog.text)
    assert "two has no images of the class 'green': its results do not include it" in caplog.text
    newest = max(tmp_path.glob("runs/test/*/test.json"), key=os.path.getmtime)
    result = json.loads(newest.read_text())
    assert [sum(row) for row in result["confusion_matrix"]] == [10, 0, 10] and result[
        "test/recall/green"
    ] is None
    overall = [
        value for name, value in result.items() if name.startswith("test/") and name.count("/") == 1
    ]
    assert len(overall) >= 4 and all(math.isfinite(value) for value in overall)


def test_other_parts_of_the_same_images_do_not_make_what_was_learned_new(tmp_path):
    before, now = data(plain(tmp_path / "a")), data(tmp_path / "a", split_seed=2)
    learned = {os.path.relpath(path, tmp_path / "a") for path in before.splits["train"].paths}
    # the control
    assert learned & set(held(checkpoint_of(now), data(tmp_path / "a", split_seed=2), "validate"))
    held(checkpoint_of(before), now, "fit")  # continues from it
    assert not learned & set(
        held(checkpoint_of(now), data(tmp_path / "a", split_seed=2), "validate")
    )
