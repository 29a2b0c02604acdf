"""Groups from paths: images of one group share a split, and a group in two existing splits is reported."""

import re
from pathlib import Path

import numpy as np
import pytest
from data_files import read
from promise import control, promise

from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.groups import put_into_groups, straddling_groups, unequal_shares
from finetune.data.samples import Samples
from finetune.data.seen import exclude_seen
from finetune.data.seen_record import add_digests
from finetune.data.targets import ClassIndex
from finetune.system.messages import WrongUsage


def write(root: Path, *names: str) -> Path:
    """Files that are not decoded, each with its own content."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name * 9)
    return root


def patients(root: Path, num: int = 40) -> Path:
    """Images of patients in both classes: three images each, in a folder of the patient."""
    return write(
        root,
        *(
            f"{name}/p{patient}/scan {i} of p{patient}.png"
            for patient in range(num)
            for name, i in (("sick", 1), ("sick", 2), ("well", 3))
        ),
    )


def data(root: Path, **options) -> ImageFolderData:
    return read(ImageFolderData(str(root), num_workers=0, **options))


def names_of(data: ImageFolderData, split: str) -> list[str]:
    return [path.removeprefix(f"{data.root}/") for path in data.splits[split].paths]


def splits_of_patients(data: ImageFolderData) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for split in data.splits:
        for name in names_of(data, split):
            found.setdefault(re.search(r"p\d+", name)[0], set()).add(split)
    return found


@promise("groups")
@pytest.mark.parametrize("group_by", ["folder", r"(p\d+)\.png", r"p\d+"])
def test_the_images_of_a_patient_share_a_split(tmp_path, group_by):
    grouped = data(patients(tmp_path), group_by=group_by)
    found = splits_of_patients(grouped)
    assert len(found) == 40 and {len(splits) for splits in found.values()} == {1}
    counts = {split: part.targets.counts().tolist() for split, part in grouped.splits.items()}
    # each patient has two images of one class and one of the other
    assert all(two == 2 * one > 0 for two, one in counts.values())
    grouped.check_can_train()


@control("groups")
def test_control_without_groups_patients_are_in_several_splits(tmp_path):
    found = splits_of_patients(data(patients(tmp_path)))
    assert sum(len(splits) > 1 for splits in found.values()) > 10


def groups_of(group_by: str, *names: str, tag: str = "") -> list[int]:
    """The number of each image's group, in the order of their first images."""
    paths = [f"/data/{name}" for name in names]
    labels = ClassIndex(np.zeros(len(names), np.int64), 1)
    ids = put_into_groups(Samples(paths, labels, folder="/data", tag=tag), group_by).groups
    order = list(dict.fromkeys(ids.tolist()))
    return [order.index(group) for group in ids.tolist()]


def test_the_group_is_the_first_capture_group_or_the_match_or_the_folder():
    names = ["cat/a1 x.png", "cat/a1 y.png", "dog/a1 x.png", "dog/b.png", "cat/b.png"]
    assert groups_of(r"(a\d) (\w)", *names) == [0, 0, 0, 1, 2]
    assert groups_of(r"a\d \w", *names) == [0, 1, 0, 2, 3]
    assert groups_of(r"^\w+/a\d", *names) == [0, 0, 1, 2, 3]
    # neither an empty match nor a capture group without a match is a group
    assert groups_of(r"z*", *names) == groups_of(r"(z)?a", *names) == [0, 1, 2, 3, 4]
    nested = ["cat/p1/1.png", "dog/p1/2.png", "cat/s/p1/1.png", "cat/1.png", "cat/2.png"]
    assert groups_of("folder", *nested) == [0, 0, 1, 2, 3]


def test_the_path_of_the_data_and_the_split_do_not_matter(tmp_path):
    first = data(patients(tmp_path / "p1 of 2"), group_by="folder")
    second = data(patients(tmp_path / "elsewhere"), group_by="folder")
    assert names_of(first, "test") == names_of(second, "test")
    samples = Samples(
        ["/d/test/cat/p1/1.png"], ClassIndex(np.zeros(1, np.int64), 1), folder="/d/test"
    )
    in_test = put_into_groups(Samples(**{**vars(samples), "tag": "test/"}), "folder").groups
    assert in_test.tolist() == put_into_groups(samples, "folder").groups.tolist()


@pytest.mark.parametrize("wrong", ["(", "", "*"])
def test_what_is_no_regular_expression_is_refused(tmp_path, wrong):
    with pytest.raises(WrongUsage, match="group_by"):
        data(patients(tmp_path), group_by=wrong)


def test_an_option_that_finds_no_group_is_refused_before_training(tmp_path):
    nothing = data(patients(tmp_path), group_by=r"cow\d")
    with pytest.raises(WrongUsage, match=r"group_by 'cow.*finds no group of two images or more"):
        nothing.check_can_train()
    # in evaluation other images may have other names
    assert "test" in nothing.splits


def test_groups_of_a_table_and_from_paths_do_not_go_together():
    labels = ClassIndex(np.zeros(1, np.int64), 1)
    samples = Samples(["a/1.png"], labels, groups=np.zeros(1, np.uint64))
    with pytest.raises(WrongUsage, match="column of groups"):
        put_into_groups(samples, "folder")
    assert put_into_groups(samples, None) is samples


def test_a_group_in_given_train_and_test_folders_is_named(tmp_path):
    write(
        tmp_path,
        "train/sick/p1/1.png",
        "train/well/p1/2.png",
        "train/sick/p2/1.png",
        "train/well/p3/1.png",
    )
    write(tmp_path, "test/sick/p2/2.png", "test/well/p4/1.png")
    given = data(tmp_path, group_by="folder", val_fraction=0)
    (line,) = straddling_groups(given.splits)
    assert line.startswith("1 group of images is both in train and in test, such as")
    assert "train/sick/p2/1.png" in line and "test/sick/p2/2.png" in line
    # the controls: without groups, and with groups that are in one split
    assert list(straddling_groups(data(tmp_path, val_fraction=0).splits)) == []
    (tmp_path / "test/sick/p2").rename(tmp_path / "test/sick/p5")
    assert list(straddling_groups(data(tmp_path, group_by="folder", val_fraction=0).splits)) == []


def test_a_share_that_is_far_off_is_stated(tmp_path):
    patients(tmp_path, 12)
    write(tmp_path, *(f"sick/huge{k}/{i}.png" for k in range(3) for i in range(100)))
    shares = {}
    for seed in range(8):
        drawn = data(tmp_path, group_by="folder", split_seed=seed)
        lines = list(unequal_shares(drawn.splits, {"val": 0.1, "test": 0.2}))
        total = sum(map(len, drawn.splits.values()))
        for split, fraction in (("val", 0.1), ("test", 0.2)):
            share = len(drawn.splits[split]) / total
            output = [line for line in lines if line.startswith(split)]
            assert len(output) == (abs(share - fraction) > fraction / 3)
            shares[split, seed] = share
    # each of the three splits gets one of the huge groups
    assert all(0.3 < share < 0.34 for share in shares.values())
    assert list(unequal_shares(data(tmp_path).splits, {"val": 0.1, "test": 0.2})) == []


@pytest.mark.parametrize(("num_labels", "num_lines"), [(40, 2), (4, 0)])
def test_a_share_that_rare_labels_move_far_off_is_stated(tmp_path, num_labels, num_lines):
    """60 images of two labels each: each of 40 labels is so rare that its images go to all splits."""
    write(tmp_path, *(f"{i}.png" for i in range(60)))
    lines = [f"{i}.png,{i % num_labels};{(i * 7 + 3) % num_labels}" for i in range(60)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,labels", *lines]))
    drawn = ImageFolderData(table=str(tmp_path / "labels.csv"))
    stated = list(unequal_shares(drawn.splits, {"val": 0.1, "test": 0.2}))
    assert len(stated) == num_lines, stated
    if stated:
        assert re.match(
            r"val has 4\d% of the images, not 10%, because images are split by", stated[0]
        )


def test_a_split_that_is_empty_because_groups_are_few_is_stated(tmp_path):
    write(
        tmp_path, *(f"{name}/{group}/{i}.png" for name in "ab" for group in "xy" for i in range(9))
    )
    shares = {"val": 0.1, "test": 0.2}
    lines = list(unequal_shares(data(tmp_path, group_by="folder").splits, shares))
    assert (
        lines[0]
        == "test has no images, because groups are not divided and are too few: 1 group in train"
    )
    assert lines[1].startswith("val has 50% of the images, not 10%") and len(lines) == 2
    without = data(tmp_path, group_by="folder", test_fraction=0, split_seed=3)
    assert not any("test" in line for line in unequal_shares(without.splits, {**shares, "test": 0}))
    (tmp_path / "train").mkdir()  # folders of one's own: no test split was asked for
    for name in "ab":
        (tmp_path / name).rename(tmp_path / "train" / name)
    lines = list(unequal_shares(data(tmp_path, group_by="folder").splits, shares))
    assert not any(line.startswith("test") for line in lines)


def test_a_class_whose_groups_are_all_set_apart_is_named(tmp_path):
    """Two classes share their groups; the fewest hold a third class, once each."""
    write(tmp_path, *(f"{name}/p{i}/1.png" for i in range(30) for name in ("a", "b")), "c/p3/1.png")
    for seed in range(10):
        drawn = data(tmp_path, group_by="folder", split_seed=seed)
        assert drawn.splits["train"].targets.counts().min() >= 1  # a class in one group trains
    folds = data(tmp_path, group_by="folder", num_folds=5, fold=1)
    with pytest.raises(
        ValueError, match=r"fold \d of 5 would have no images to train on of c: add"
    ):
        folds.check_can_train()


def test_fewer_groups_than_folds_are_refused_by_the_first_fold(tmp_path):
    write(tmp_path, *(f"{name}/p{i}/{j}.png" for i in range(4) for j in "xy" for name in "ab"))
    for num_folds in (4, 5):
        folds = [
            data(tmp_path, group_by="folder", num_folds=num_folds, fold=i + 1)
            for i in range(num_folds)
        ]
        empty = [i + 1 for i, fold in enumerate(folds) if "test" not in fold.splits]
        if num_folds == 5:
            with pytest.raises(ValueError, match=f"fold {empty[0]} of 5 would test no image"):
                folds[0].check_can_train()
        else:
            assert not empty
            folds[0].check_can_train()


def test_images_of_a_group_that_was_trained_on_are_not_tested(tmp_path, caplog):
    """A group of one image is split by the image's name, and may move when it grows."""
    write(tmp_path, *(f"{name}/p{i} of {name}/1.png" for i in range(60) for name in ("a", "b")))
    write(tmp_path, "a/x/1.png", "a/x/2.png")
    before = data(tmp_path, group_by="folder")
    seen = add_digests(before.seen, before.splits["train"], before.splits.get("val"))
    checkpoint = {
        "finetune": {"data_fingerprint": before.fingerprint, "seen": seen.pack()},
        "datamodule_hyper_parameters": dict(before.hparams),
    }
    trained = {
        name.rpartition("/")[0] for split in ("train", "val") for name in names_of(before, split)
    }
    write(tmp_path, *(f"{name}/p{i} of {name}/2.png" for i in range(60) for name in ("a", "b")))
    after = data(tmp_path, group_by="folder")
    moved = {name.rpartition("/")[0] for name in names_of(after, "test")} & trained
    assert moved  # the control: without the exclusion they would be tested
    exclude_seen(after, "test", checkpoint)
    tested = {name.rpartition("/")[0] for name in names_of(after, "test")}
    assert tested and not tested & trained


def test_folds_of_a_folder_test_each_image_once(tmp_path):
    patients(tmp_path)
    tested = []
    for fold in range(1, 6):
        drawn = data(tmp_path, group_by="folder", num_folds=5, fold=fold)
        assert {len(splits) for splits in splits_of_patients(drawn).values()} == {1}
        assert sum(map(len, drawn.splits.values())) == 120
        tested += names_of(drawn, "test")
    assert len(tested) == len(set(tested)) == 120


def test_folds_of_several_labels_keep_groups_whole_and_share_rare_labels(tmp_path):
    rows = [(f"p{i // 2}/{i}.png", "rare;often" if i % 20 < 2 else "often") for i in range(120)]
    rows += [("q/1.png", "")]
    write(tmp_path, *(path for path, _ in rows))
    lines = [f"{path},{labels},{path.partition('/')[0]}" for path, labels in rows]
    (tmp_path / "labels.csv").write_text("\n".join(["path,labels,group", *lines]))
    tested = []
    for fold in (1, 2, 3):
        drawn = ImageFolderData(table=str(tmp_path / "labels.csv"), num_folds=3, fold=fold)
        drawn.check_can_train()
        groups = [set(part.groups.tolist()) for part in drawn.splits.values()]
        assert sum(map(len, groups)) == len(set.union(*groups)) == 61
        # of the six groups with the rare label each fold tests two, one more or less
        assert 2 <= drawn.splits["test"].targets.counts()[drawn.class_names.index("rare")] <= 6
        tested += list(drawn.splits["test"].paths)
    assert len(tested) == len(set(tested)) == 121


def test_a_label_that_a_fold_would_not_train_is_named_by_the_first_fold(tmp_path):
    """The two images of `label` have rarer labels as well, by which they are split."""
    labels = {f"{i}.png": "often" for i in range(30)}
    labels |= {"x1.png": "label;a", "x2.png": "label;b", "aa.png": "a", "bb.png": "b"}
    write(tmp_path, *labels)
    lines = [f"{path},{names}" for path, names in labels.items()]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,labels", *lines]))
    outcomes = set()
    for seed in range(12):
        first, second = (
            ImageFolderData(table=str(table), num_folds=2, fold=fold, split_seed=seed)
            for fold in (1, 2)
        )
        counts = [each.splits["train"].targets.counts() for each in (first, second)]
        is_trained = bool(np.all(counts))
        outcomes.add(is_trained)
        if is_trained:
            first.check_can_train()
        else:
            with pytest.raises(ValueError, match="would have no images to train on of label: add"):
                first.check_can_train()
    assert outcomes == {False, True}


def test_folds_split_train_and_leave_a_test_folder(tmp_path):
    write(tmp_path, *(f"train/{name}/{i}.png" for i in range(50) for name in ("a", "b")))
    write(tmp_path, "test/a/x.png", "test/b/x.png", "val/a/y.png", "val/b/y.png")
    drawn = data(tmp_path, num_folds=5, fold=2)
    assert all(
        name.startswith("train/") for split in ("train", "test") for name in names_of(drawn, split)
    )
    assert names_of(drawn, "val") == ["val/a/y.png", "val/b/y.png"]
    assert len(drawn.splits["train"]) + len(drawn.splits["test"]) == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold": 1}, "go together"),
        ({"num_folds": 5}, "go together"),
        ({"num_folds": 1, "fold": 1}, "num_folds must be from 2"),
        ({"num_folds": 5, "fold": 6}, "fold from 1 to num_folds"),
        (
            {"num_folds": 2, "fold": 1, "val_fraction": 0.5, "test_fraction": 0.2},
            "leave some training",
        ),
    ],
)
def test_folds_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(WrongUsage, match=message):
        data(patients(tmp_path), **options)
