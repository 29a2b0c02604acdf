"""Data modules: what they read when, and which image is in which split, group and fold."""

import copy
import logging
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import draw_colours
from data_files import paths, real_data, small
from promise import control, promise

from finetune import FashionMNIST, ImageFolderData, SampleData
from finetune.data import drawn_splits, splits
from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets import image_folder
from finetune.data.datasets.image_folder import Hotdog
from finetune.system.messages import WrongUsage

# Reading


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (ImageFolderData, {"root": "absent"}),
        (ImageFolderData, {"table": "absent.csv"}),
        (ImageFolderData, {"predict": "absent"}),
        (ImageFolderData, {"root": ".", "corrections": "absent.csv"}),
        (Hotdog, {}),
        (FashionMNIST, {"root": "s3://bucket/absent"}),
        (SampleData, {"root": "absent"}),
    ],
)
def test_a_data_module_reads_nothing_until_it_is_used(tmp_path, monkeypatch, kind, place):
    def fetch(*_):
        raise OSError("fetched")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(image_folder, "fetch_archive", fetch)
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


def test_a_missing_hotdog_folder_is_fetched_once(colours, tmp_path, monkeypatch):
    asked = []

    def fetch(url: str, sha1: str, root: Path) -> None:
        asked.append((url, sha1))
        root.symlink_to(colours)

    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    monkeypatch.setattr(image_folder, "fetch_archive", fetch)
    assert len(Hotdog().splits["test"]) == len(Hotdog().splits["test"]) == 30
    ((url, sha1),) = asked
    # the book's
    assert url.endswith("/hotdog.zip") and sha1 == "fba480ffa8aa7e0febbb511d181409f899b9baa5"
    assert Hotdog(str(colours)).class_names == ["blue", "green", "red"] and len(asked) == 1


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


# Splits


def test_folders_of_splits_and_of_classes_are_split_by_the_fractions(colours, monkeypatch):
    data = small(colours, val_fraction=0.25)
    counts = {split: part.targets.counts() for split, part in data.splits.items()}
    assert set(counts) == {"train", "test", "val"} and data.class_names == ["blue", "green", "red"]
    assert (counts["train"] + counts["val"]).tolist() == [20] * 3
    assert counts["test"].tolist() == [10] * 3 and np.abs(counts["val"] - 5).max() <= 1
    for split, part in data.splits.items():
        folders = [path.split("/")[1] for path in paths(data, split)]
        assert [data.class_names[label] for label in part.targets.labels] == folders
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")  # not of the splits
    assert paths(small(colours, val_fraction=0.25), "val") == paths(data, "val")
    assert paths(small(colours, val_fraction=0.25, split_seed=1), "val") != paths(data, "val")
    assert "val" not in small(colours, val_fraction=0).splits
    assert small(colours, val_fraction=0).val_dataloader() == []
    data = small(colours / "train", val_fraction=0.1, test_fraction=0.3)
    sizes = np.array([data.splits[split].targets.counts() for split in ("train", "val", "test")])
    assert sizes.sum(axis=0).tolist() == [20] * 3 and np.abs(sizes - [[12], [2], [6]]).max() <= 1


def test_a_validation_folder_is_taken_as_it_is(colours, tmp_path):
    for name, source in ("train", "train"), ("valid", "test"):
        (tmp_path / name).symlink_to(colours / source)
    data = small(tmp_path)
    assert len(data.splits["train"]) == 60 and len(data.splits["val"]) == 30
    with pytest.raises(ValueError, match="no test split: .*/test/CLASS"):
        data.test_dataloader()
    with pytest.raises(ValueError, match="--data.predict"):
        data.predict_dataloader()


def test_class_names_of_a_checkpoint_serve_where_only_test_is_there(colours, tmp_path):
    (tmp_path / "test").symlink_to(colours / "test")
    data = small(tmp_path, class_names=["red", "green", "blue"])
    assert list(data.splits) == ["test"] and data.class_names == ["red", "green", "blue"]
    labels = torch.cat([batch["label"] for batch in data.test_dataloader()])
    # in the order of the classes: red
    assert torch.bincount(labels).tolist() == [10, 10, 10] and labels[0] == 0
    with pytest.raises(ValueError, match="'green'"):
        small(tmp_path, class_names=["red", "blue"])


@pytest.mark.parametrize("filled", [(), ("green", "red")])
def test_given_classes_without_an_image_are_refused_in_training(tmp_path, filled):
    draw_colours(tmp_path, train=3)
    names = ["blue", "green", "red"]
    for path in (tmp_path / "train").rglob("*.png"):
        if path.parent.name not in filled:
            path.unlink()
    with pytest.raises(ValueError, match="to train on of .*add some") as caught:
        small(tmp_path, class_names=names).check_can_train()
    assert all((name in str(caught.value)) == (name not in filled) for name in names)


@pytest.mark.parametrize("target", ["nowhere.png", "99.png"])
@pytest.mark.parametrize("place", ["few", "few/train"])
def test_a_dangling_link_is_named_or_skipped(few, tmp_path, target, place):
    path = shutil.copytree(few, tmp_path / "few") / "train/red/99.png"
    path.symlink_to(target)  # to nothing, or to itself
    with pytest.raises(ValueError, match="target of this link") as caught:
        small(tmp_path / place)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    data = small(tmp_path / place, on_bad_image="skip")
    assert [fault.where for fault in data.scanned.faults] == [str(path)]
    assert all(str(path) not in part.paths for part in data.splits.values())


# Groups and folds


@pytest.fixture
def patients(tmp_path) -> Path:
    """Images of 40 patients in both classes: three images each, in a folder of the patient. They are not decoded."""
    for patient in range(40):
        for name, i in (("sick", 1), ("sick", 2), ("well", 3)):
            path = tmp_path / f"set/{name}/p{patient}/scan {i} of p{patient}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(path.name * 9)
    return tmp_path / "set"


def splits_of_patients(data: ImageDataModule) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for split in data.splits:
        for path in paths(data, split):
            found.setdefault(path.split("/")[1], set()).add(split)
    return found


def forget_the_groups(monkeypatch):
    def units(names, strata, seed, _) -> splits.Units:
        return units_of(names, strata, seed, None)

    units_of = splits.units_of
    monkeypatch.setattr(splits, "units_of", units)


@promise("groups", controls=[forget_the_groups])
@pytest.mark.parametrize("group_by", ["folder", r"(p\d+)\.png", r"p\d+"])
def test_group_by_keeps_the_images_of_a_patient_in_one_split(patients, tmp_path, group_by):
    grouped = small(patients, group_by=group_by)
    found = splits_of_patients(grouped)
    assert len(found) == 40 and {len(splits) for splits in found.values()} == {1}
    counts = [part.targets.counts().tolist() for part in grouped.splits.values()]
    # each patient has two images of one class and one of the other
    assert all(two == 2 * one > 0 for two, one in counts)
    grouped.check_can_train()
    # the place of the data does not matter
    moved = patients.rename(tmp_path / "p1 of 2")
    assert paths(small(moved, group_by=group_by), "test") == paths(grouped, "test")


@control("groups")
def test_control_without_group_by_patients_are_in_several_splits(patients):
    found = splits_of_patients(small(patients))
    assert sum(len(splits) > 1 for splits in found.values()) > 10


def test_group_by_that_will_not_do_is_refused(patients):
    for wrong in ("(", "", "*"):
        with pytest.raises(WrongUsage, match="group_by"):
            small(patients, group_by=wrong)
    nothing = small(patients, group_by=r"cow\d")
    with pytest.raises(WrongUsage, match=r"group_by 'cow.*no group"):
        nothing.check_can_train()
    # in evaluation other images may have other names
    assert "test" in nothing.splits


def take_the_first_fold_only(monkeypatch):
    def first(units, fold, num_folds, val_fraction):
        return fold_parts(units, 1, num_folds, val_fraction)

    fold_parts = splits.fold_parts
    monkeypatch.setattr(drawn_splits, "fold_parts", first)


@promise("groups", controls=[take_the_first_fold_only])
def test_folds_of_a_folder_test_each_image_once(patients):
    tested = []
    for fold in range(1, 6):
        drawn = small(patients, group_by="folder", num_folds=5, fold=fold)
        assert {len(splits) for splits in splits_of_patients(drawn).values()} == {1}
        assert sum(map(len, drawn.splits.values())) == 120
        tested += paths(drawn, "test")
    assert len(tested) == len(set(tested)) == 120
    for patient in range(4, 40):
        for name in ("sick", "well"):
            shutil.rmtree(patients / f"{name}/p{patient}")
    small(patients, group_by="folder", num_folds=4, fold=1).check_can_train()
    with pytest.raises(ValueError, match="would test no image: take fewer folds"):
        small(patients, group_by="folder", num_folds=5, fold=1).check_can_train()


def test_folds_split_train_and_leave_other_folders(colours, tmp_path):
    for name, source in ("train", "train"), ("val", "test"), ("test", "test"):
        (tmp_path / name).symlink_to(colours / source)
    drawn = small(tmp_path, num_folds=5, fold=2)
    assert all(path.startswith("train/") for path in paths(drawn, "train") + paths(drawn, "test"))
    assert len(drawn.splits["train"]) + len(drawn.splits["test"]) == 60
    assert all(path.startswith("val/") for path in paths(drawn, "val"))


def test_a_label_that_a_fold_would_not_train_is_named_by_the_first_fold(tmp_path):
    """The two images of `label` have rarer labels as well, by which they are split."""
    labels = {f"{i}.png": "often" for i in range(30)}
    labels |= {"x1.png": "label;a", "x2.png": "label;b", "aa.png": "a", "bb.png": "b"}
    for path in labels:
        (tmp_path / path).write_text(path)
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,labels", *(f"{path},{of}" for path, of in labels.items())]))
    outcomes = set()
    for seed in range(12):
        options = {"table": str(table), "num_folds": 2, "split_seed": seed}
        folds = [ImageFolderData(**options, fold=fold) for fold in (1, 2)]
        is_trained = all(fold.splits["train"].targets.counts().all() for fold in folds)
        outcomes.add(is_trained)
        if is_trained:
            folds[0].check_can_train()
        else:
            with pytest.raises(ValueError, match="to train on of label: add"):
                folds[0].check_can_train()
        # without folds each label has training images
        whole = ImageFolderData(table=str(table), split_seed=seed)
        assert whole.splits["train"].targets.counts().all()
    assert outcomes == {False, True}
