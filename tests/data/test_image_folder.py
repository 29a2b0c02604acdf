"""Which image is in which split, and where the named data sets come from."""

import copy
import logging
import pickle
import shutil
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from colours import draw_colours
from data_files import paths, real_data, small

from finetune import FashionMNIST, SampleData
from finetune.data.datasets import image_folder
from finetune.data.datasets.image_folder import Hotdog, ImageFolderData


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (ImageFolderData, {"root": "absent"}),
        (ImageFolderData, {"table": "absent.csv"}),
        (ImageFolderData, {"predict": "absent"}),
        (ImageFolderData, {"root": ".", "corrections": "absent.csv"}),
        (Hotdog, {}),
        (FashionMNIST, {"root": "absent", "exclude": "Bag"}),
        (SampleData, {"root": "absent"}),
    ],
)
def test_a_data_module_reads_nothing_until_it_is_used(tmp_path, monkeypatch, kind, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(image_folder, "fetch_archive", Mock(side_effect=OSError("fetched")))
    data = pickle.loads(pickle.dumps(kind(**place)))
    assert not list(tmp_path.iterdir())
    for use in (data.read, lambda: data.splits, lambda: data.class_names, data.read):
        with pytest.raises((OSError, ValueError)):
            use()


def test_a_data_module_is_read_once_and_after_an_error_again(colours, tmp_path):
    folder = tmp_path / "colours"
    names = ["red", "green", "blue"]
    expected = small(colours, class_names=names)
    late = ImageFolderData(str(folder), class_names=names, num_workers=0)
    with pytest.raises(FileNotFoundError, match="colours' does not exist"):
        late.setup("fit")
    folder.symlink_to(colours)
    unread = copy.deepcopy(late)
    late.setup("fit")
    unread.read()
    folder.unlink()
    for each in (late, unread, copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        each.read()
        assert each.class_names == names and each.hparams == late.hparams
        assert paths(each, "val") == paths(expected, "val")
        assert each.fingerprint == expected.fingerprint
    assert unread.seen.digests is None and late.seen.digests is not None


def test_a_validation_split_is_a_part_of_train(colours):
    data = small(colours, val_fraction=0.25)
    assert data.class_names == ["blue", "green", "red"] and set(data.splits) == {
        "train",
        "val",
        "test",
    }
    counts = {split: s.targets.counts() for split, s in data.splits.items()}
    assert (counts["train"] + counts["val"]).tolist() == [20] * 3 and counts["test"].tolist() == [
        10
    ] * 3
    assert np.abs(counts["val"] - 5).max() <= 1  # numbered images fall evenly, see test_splits.py
    both = paths(data, "train") + paths(data, "val")
    assert len(set(both)) == 60 and all(path.startswith("train/") for path in both)
    for split, part in data.splits.items():
        assert [data.class_names[label] for label in part.targets.labels] == [
            p.split("/")[1] for p in paths(data, split)
        ]


def test_the_validation_split_depends_on_its_own_seed_alone(colours, monkeypatch):
    chosen = paths(small(colours), "val")
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert paths(small(colours), "val") == chosen != paths(small(colours, split_seed=1), "val")


def test_class_folders_alone_are_split_in_three(colours):
    data = small(colours / "train", val_fraction=0.1, test_fraction=0.3)
    counts = np.array([data.splits[split].targets.counts() for split in ("train", "val", "test")])
    assert counts.sum(axis=0).tolist() == [20] * 3 and np.abs(counts - [[12], [2], [6]]).max() <= 1
    assert len({path for split in data.splits for path in paths(data, split)}) == 60


def test_a_validation_folder_is_taken_as_it_is(colours, tmp_path):
    for name, source in ("train", "train"), ("valid", "test"):
        (tmp_path / name).symlink_to(colours / source)
    data = small(tmp_path)
    assert len(data.splits["train"]) == 60 and len(data.splits["val"]) == 30
    assert "test" not in data.splits
    with pytest.raises(ValueError, match="no test split: put images in .*/test/CLASS"):
        data.test_dataloader()


def test_class_names_of_a_checkpoint_serve_where_only_test_is_there(colours, tmp_path):
    (tmp_path / "test").symlink_to(colours / "test")
    data = small(tmp_path, class_names=["red", "green", "blue"])
    assert (
        set(data.splits) == {"test"}
        and data.class_names == ["red", "green", "blue"]
        and data.fingerprint == ""
    )
    labels = torch.cat([batch["label"] for batch in data.test_dataloader()])
    # in the order of the classes: red
    assert torch.bincount(labels).tolist() == [10, 10, 10] and labels[0] == 0
    with pytest.raises(ValueError, match="'green'"):
        small(tmp_path, class_names=["red", "blue"])


def test_the_fingerprint_is_that_of_the_training_part(colours):
    assert small(colours).fingerprint == small(colours, image_size=32).fingerprint != ""
    assert small(colours).fingerprint != small(colours, split_seed=1).fingerprint


@pytest.mark.parametrize("target", ["nowhere.png", "99.png", None])
def test_a_file_that_is_gone_is_named_or_skipped(few, tmp_path, monkeypatch, target):
    """A dangling link, a link to itself, and a file that goes between the search and the look at its size."""
    path = shutil.copytree(few, tmp_path / "few") / "train/red/99.png"
    (path.parent / "03.png").unlink()
    (path.parent.parent / "blue/03.png").unlink()
    path.symlink_to(target or "00.png")
    if target is None:
        ask = image_folder.file_stats

        def ask_late(*args, **options):
            path.unlink(missing_ok=True)
            return ask(*args, **options)

        monkeypatch.setattr(image_folder, "file_stats", ask_late)
    with pytest.raises(OSError) as caught:
        small(tmp_path / "few", val_fraction=0)
    # which the command line prints in one line
    assert caught.value.filename == str(path) and caught.value.strerror
    if target is None:
        path.symlink_to("00.png")
    (batch,) = small(tmp_path / "few", val_fraction=0, on_bad_image="skip").train_dataloader()
    ((_, error),) = batch["bad"]
    assert len(batch["label"]) == 14 and str(path) in error


def test_an_existing_folder_is_used_whatever_its_origin(colours, monkeypatch):
    monkeypatch.setattr(
        "finetune.data.datasets.image_folder.fetch_archive", lambda *_: pytest.fail("fetched")
    )
    assert Hotdog(str(colours)).class_names == ["blue", "green", "red"]


def test_a_missing_hotdog_folder_is_fetched(colours, tmp_path, monkeypatch):
    asked = []

    def fetch(url: str, sha1: str, root: Path) -> None:
        asked.append((url, sha1))
        root.symlink_to(colours)

    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    monkeypatch.setattr("finetune.data.datasets.image_folder.fetch_archive", fetch)
    assert len(Hotdog().splits["test"]) == 30
    assert len(Hotdog().splits["test"]) == 30  # now it is there
    assert Path("data/hotdog").is_symlink()
    ((url, sha1),) = asked
    # the book's
    assert url.endswith("/hotdog.zip") and sha1 == "fba480ffa8aa7e0febbb511d181409f899b9baa5"


@pytest.mark.real
def test_the_real_hotdog_folder(caplog):
    with caplog.at_level(logging.WARNING):
        data = Hotdog(str(real_data("hotdog")), val_fraction=0.1, image_size=64, num_workers=0)
    assert data.class_names == ["hotdog", "not-hotdog"] and not caplog.records
    counts = {split: part.targets.counts().tolist() for split, part in data.splits.items()}
    assert counts["test"] == [400, 400] and np.abs(np.subtract(counts["train"], 900)).max() <= 2
    assert np.add(counts["train"], counts["val"]).tolist() == [1000, 1000]
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (32, 3, 64, 64) and batch["bad"] == []
    assert batch["image"].float().mean(dim=(0, 2, 3)).argmax() == 0  # food is red


@pytest.mark.parametrize("exclude", ["results", ["results"]])
def test_class_folders_are_left_out_and_a_checkpoint_knows_it(tmp_path, exclude):
    draw_colours(tmp_path, train=3)
    (tmp_path / "train" / "results").mkdir()
    with pytest.raises(ValueError, match="--data.exclude results"):  # control
        ImageFolderData(str(tmp_path), image_size=32).read()
    found = ImageFolderData(str(tmp_path), image_size=32, exclude=exclude)
    assert found.class_names == ["blue", "green", "red"] and found.hparams["exclude"] == exclude


@pytest.mark.parametrize("filled", [(), ("green", "red")])
def test_given_classes_without_an_image_are_refused_in_training(tmp_path, filled):
    draw_colours(tmp_path, train=3)
    for path in (tmp_path / "train").rglob("*.png"):
        if path.parent.name not in filled:
            path.unlink()
    names = ["blue", "green", "red"]
    data = small(tmp_path, class_names=names)
    lacking = ", ".join(name for name in names if name not in filled)
    with pytest.raises(ValueError, match=f"no images to train on of {lacking}: add some"):
        data.check_can_train()


def test_a_copy_with_decomposed_names_is_the_same_data(tmp_path):
    names = [
        f"{stem} {number}" for stem in ("pomme", "pêche", "zèbre", "épi") for number in range(12)
    ]
    found = {}
    for form in ("NFC", "NFD"):
        for label in ("fête", "ouvert"):
            folder = tmp_path / form / unicodedata.normalize(form, label)
            folder.mkdir(parents=True)
            for i, name in enumerate(names):
                cv2.imwrite(
                    str(folder / unicodedata.normalize(form, f"{name}.png")),
                    np.full((4, 4, 3), i, np.uint8),
                )
        data = found[form] = ImageFolderData(str(tmp_path / form))
        assert data.class_names == ["fête", "ouvert"] and len(data.splits["val"]) > 0
    before, after = found.values()
    assert before.fingerprint == after.fingerprint
    for split, part in before.splits.items():
        other = after.splits[split]
        assert [unicodedata.normalize("NFC", name) for name in other.names()] == list(part.names())
        assert [other.read(i)[0, 0, 0] for i in range(9)] == [
            part.read(i)[0, 0, 0] for i in range(9)
        ]
    # the control
    assert list(after.splits["train"].names()) != list(before.splits["train"].names())
