"""From a folder to batches: splits, the same pixels for any workers and devices, prediction lists, Fashion-MNIST."""

import gzip
import hashlib
import logging
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from data_files import idx, real_data
from pytorch_lightning.trainer.connectors.data_connector import _parse_num_batches
from pytorch_lightning.trainer.states import RunningStage
from torchvision.datasets import FashionMNIST as Source

from finetune.data import seen
from finetune.data.datamodule import ImageDataModule, position
from finetune.data.datasets import synthetic
from finetune.data.datasets.fashion_mnist import FashionMNIST
from finetune.data.datasets.image_folder import Hotdog, ImageFolderData, SampleData
from finetune.data.decode import DecodeError
from finetune.data.samplers import train_order
from finetune.data.splits import stratified
from finetune.data.transforms import eval_transform


def small(root: Path, **options) -> ImageFolderData:
    return ImageFolderData(str(root), **{"image_size": 24, "num_workers": 0, **options})


def on_device(data: ImageDataModule, rank: int, world_size: int, **limits: float) -> ImageDataModule:
    """The data module as device `rank` of `world_size` sees it, at the start of a run."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **limits)
    names = ("overfit_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
    data.trainer = SimpleNamespace(
        **{"global_rank": rank, "world_size": world_size, "num_devices": 1, "strategy": trainer.strategy},
        **{"fit_loop": trainer.fit_loop, "state": trainer.state, **{name: getattr(trainer, name) for name in names}},
    )
    return data


def paths(data: ImageDataModule, split: str) -> list[str]:
    return [Path(path).relative_to(data.root).as_posix() for path in data.splits[split].paths]


# Splits


def test_a_validation_split_is_a_part_of_train(colours):
    data = small(colours, val_fraction=0.25)
    assert data.class_names == ["blue", "green", "red"] and set(data.splits) == {"train", "val", "test"}
    counts = {split: np.bincount(s.labels) for split, s in data.splits.items()}
    assert (counts["train"] + counts["val"]).tolist() == [20] * 3 and counts["test"].tolist() == [10] * 3
    assert np.abs(counts["val"] - 5).max() <= 1  # numbered pictures fall evenly, see test_splits.py
    both = paths(data, "train") + paths(data, "val")
    assert len(set(both)) == 60 and all(path.startswith("train/") for path in both)
    for split, part in data.splits.items():
        assert [data.class_names[label] for label in part.labels] == [p.split("/")[1] for p in paths(data, split)]


def test_the_validation_split_depends_on_its_own_seed_alone(colours, monkeypatch):
    chosen = paths(small(colours), "val")
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert paths(small(colours), "val") == chosen != paths(small(colours, split_seed=1), "val")


def test_class_folders_alone_are_split_in_three(colours):
    data = small(colours / "train", val_fraction=0.1, test_fraction=0.3)
    counts = np.array([np.bincount(data.splits[split].labels) for split in ("train", "val", "test")])
    assert counts.sum(axis=0).tolist() == [20] * 3 and np.abs(counts - [[12], [2], [6]]).max() <= 1
    assert len({path for split in data.splits for path in paths(data, split)}) == 60


def test_no_validation_is_wanted_or_given(colours):
    data = small(colours, val_fraction=0)
    assert "val" not in data.splits and len(data.splits["train"].labels) == 60
    assert data.val_dataloader() == []


def test_a_validation_folder_is_taken_as_it_is(colours, tmp_path):
    for name, source in ("train", "train"), ("valid", "test"):
        (tmp_path / name).symlink_to(colours / source)
    data = small(tmp_path)
    assert len(data.splits["train"].labels) == 60 and len(data.splits["val"].labels) == 30
    assert "test" not in data.splits
    with pytest.raises(ValueError, match="no test split: put pictures in .*/test/CLASS"):
        data.test_dataloader()


def test_class_names_of_a_checkpoint_serve_where_only_test_is_there(colours, tmp_path):
    (tmp_path / "test").symlink_to(colours / "test")
    data = small(tmp_path, class_names=["red", "green", "blue"])
    assert set(data.splits) == {"test"} and data.class_names == ["red", "green", "blue"] and data.fingerprint == ""
    labels = torch.cat([batch["label"] for batch in data.test_dataloader()])
    assert torch.bincount(labels).tolist() == [10, 10, 10] and labels[0] == 0  # in the order of the classes: red
    with pytest.raises(ValueError, match="'green'"):
        small(tmp_path, class_names=["red", "blue"])


def test_the_fingerprint_is_that_of_the_training_part(colours):
    assert small(colours).fingerprint == small(colours, image_size=32).fingerprint != ""
    assert small(colours).fingerprint != small(colours, split_seed=1).fingerprint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size .* got 0"),
        ({"image_size": 4}, "image_size 8, got .* 4"),
        ({"val_fraction": 1.0}, "val_fraction 1.0"),
        ({"val_fraction": -0.1}, "val_fraction -0.1"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "training data"),
        ({"augmentations": [{"class_path": "Nope"}]}, "no transform 'Nope'"),
    ],
)
def test_values_that_make_no_sense(colours, options, words):
    with pytest.raises(ValueError, match=words):
        small(colours, **options)


def test_no_root():
    with pytest.raises(ValueError, match="--data.root FOLDER"):
        ImageFolderData()


# Batches


def two_epochs(data: ImageDataModule) -> list[dict]:
    loader, batches = data.train_dataloader(), []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        batches += list(loader)
    return batches


@pytest.fixture(scope="module")
def few(colours, tmp_path_factory) -> Path:
    """Eight pictures of each class, two of them damaged."""
    root = tmp_path_factory.mktemp("few")
    for name in ("blue", "red"):
        (root / "train" / name).mkdir(parents=True)
        for path in sorted((colours / "train" / name).iterdir())[:8]:
            (root / "train" / name / path.name).write_bytes(path.read_bytes())
        (root / "train" / name / "03.png").write_bytes(b"\x89PNG")
    return root


# A real warning for a person who asks for it, and here the purpose: more workers than cores.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_number_of_workers_changes_no_pixel(few, num_workers):
    options = {"batch_size": 5, "val_fraction": 0, "on_bad_image": "skip"}
    expected = two_epochs(small(few, **options))
    batches = two_epochs(small(few, **options, num_workers=num_workers))
    assert len(batches) == len(expected) == 8
    for batch, reference in zip(batches, expected, strict=True):
        assert all(torch.equal(batch[name], reference[name]) for name in ("image", "label", "index"))
        assert batch["bad"] == reference["bad"]
    assert sum(len(batch["bad"]) for batch in expected) == 4
    assert not torch.equal(expected[0]["image"], expected[4]["image"])  # the epochs differ


def test_control_without_a_seed_for_each_picture_the_pixels_differ(few, monkeypatch):
    options = {"batch_size": 5, "val_fraction": 0, "on_bad_image": "skip"}
    expected = two_epochs(small(few, **options))
    for num_workers in (0, 1):
        data = small(few, **options, num_workers=num_workers)
        monkeypatch.setattr("finetune.data.dataset.set_random_seed", lambda transform, seed: None)
        batches = two_epochs(data)
        assert all(torch.equal(a["index"], b["index"]) for a, b in zip(batches, expected, strict=True))
        assert not any(torch.equal(a["image"], b["image"]) for a, b in zip(batches, expected, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_of_all_devices_joined_are_the_global_batches(colours, world_size):
    expected = two_epochs(small(colours, batch_size=7))
    shares = [two_epochs(on_device(small(colours, batch_size=7), rank, world_size)) for rank in range(world_size)]
    for batch, parts in zip(expected, zip(*shares, strict=True), strict=True):
        for name in ("image", "label", "index"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_devices_joined_evaluate_every_picture_once_in_order(colours, world_size):
    data = small(colours, batch_size=8)
    shares = [list(on_device(small(colours, batch_size=8), r, world_size).test_dataloader()) for r in range(world_size)]
    assert len({len(batches) for batches in shares}) == 1
    indices = torch.cat([batch["index"] for batches in shares for batch in batches])
    assert indices.tolist() == list(range(30))
    images = torch.cat([batch["image"] for batches in shares for batch in batches])
    transform, test = eval_transform(24), data.splits["test"]
    for i, path in enumerate(test.paths):
        expected = transform(image=cv2.imread(path, cv2.IMREAD_COLOR_RGB))["image"]
        np.testing.assert_array_equal(images[i].permute(1, 2, 0).numpy(), expected)
    assert torch.cat([b["label"] for batches in shares for b in batches]).tolist() == test.labels.tolist()


def test_the_order_of_training_follows_the_seed_of_the_run(colours, monkeypatch):
    for seed in ("0", "3"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        indices = torch.cat([batch["index"] for batch in small(colours, val_fraction=0).train_dataloader()])
        np.testing.assert_array_equal(indices, train_order(60, int(seed), 0))


def test_training_goes_on_where_the_trainer_stands(colours):
    whole = two_epochs(small(colours, batch_size=10))
    data = on_device(small(colours, batch_size=10), 0, 1)
    loop = data.trainer.fit_loop
    # As in a checkpoint after batch 2 of epoch 1: one epoch is done, another begun.
    loop.epoch_progress.current.started, loop.epoch_progress.current.processed = 2, 1
    loop.epoch_loop.batch_progress.current.processed = 2
    assert position(data.trainer) == (1, 2)
    for batch, expected in zip(data.train_dataloader(), whole[6 + 2 :], strict=True):
        assert torch.equal(batch["image"], expected["image"])
    # At the end of an epoch the batches of that epoch still stand there.
    loop.epoch_progress.current.processed = 2
    assert position(data.trainer) == (2, 0)
    assert position(None) == (0, 0)


def test_a_damaged_picture_is_named_or_skipped(few):
    with pytest.raises(DecodeError, match="03.png: can't be decoded: .*; --data.on_bad_image skip leaves out"):
        list(small(few, val_fraction=0).train_dataloader())
    (batch,) = small(few, val_fraction=0, on_bad_image="skip").train_dataloader()
    assert len(batch["label"]) == 14 and sorted(i for i, _ in batch["bad"]) == [3, 11]


@pytest.mark.parametrize("target", ["nowhere.png", "99.png", None])
def test_a_file_that_is_gone_is_named_or_skipped(few, tmp_path, monkeypatch, target):
    """A link to nothing, to itself, and a file that goes between the search and the look at its size."""
    path = shutil.copytree(few, tmp_path / "few") / "train/red/99.png"
    (path.parent / "03.png").unlink()
    (path.parent.parent / "blue/03.png").unlink()
    path.symlink_to(target or "00.png")
    if target is None:
        sizes = seen._sizes
        monkeypatch.setattr(seen, "_sizes", lambda *a: [path.unlink(missing_ok=True), sizes(*a)][1])
    with pytest.raises(OSError) as caught:
        small(tmp_path / "few", val_fraction=0)
    assert caught.value.filename == str(path) and caught.value.strerror  # which the command line prints in one line
    if target is None:
        path.symlink_to("00.png")
    (batch,) = small(tmp_path / "few", val_fraction=0, on_bad_image="skip").train_dataloader()
    ((_, error),) = batch["bad"]
    assert len(batch["label"]) == 14 and str(path) in error


def test_full_shared_memory_is_told_before_workers_wait_for_it(colours, monkeypatch):
    monkeypatch.setattr("finetune.data.loader.shutil.disk_usage", lambda path: SimpleNamespace(free=2**16))
    with pytest.raises(ValueError, match="/dev/shm has 0 MB free.*--shm-size"):
        small(colours, num_workers=2, image_size=224).train_dataloader()
    assert small(colours, num_workers=0, image_size=224).train_dataloader()  # takes none


# Prediction


@pytest.fixture
def some(tmp_path, colours, monkeypatch) -> Path:
    pictures = [path.read_bytes() for path in sorted((colours / "test/red").iterdir())]
    for name, content in zip(("b/2.png", "a/ö.PNG", "a/1.png", "top.png"), pictures, strict=False):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes.md").write_text("no picture")
    (tmp_path / "list.txt").write_text("b/2.png\n\nnowhere.png\r\na/ö.PNG\nb/2.png\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PATTERNS = {
    "top.png": ["top.png"],
    "notes.md": ["notes.md"],  # what a person names is tried; its row will say what is wrong
    ".": ["./a/1.png", "./a/ö.PNG", "./b/2.png", "./top.png"],
    "a": ["a/1.png", "a/ö.PNG"],
    "*/*.png": ["a/1.png", "b/2.png"],
    "**/*.png": ["a/1.png", "b/2.png", "top.png"],
    "*": ["list.txt", "notes.md", "top.png"],
    "list.txt": ["b/2.png", "nowhere.png", "a/ö.PNG", "b/2.png"],  # as listed, twice too
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_to_be_predicted(some, pattern):
    data = ImageFolderData(predict=pattern)
    assert list(data.splits) == ["predict"] and list(data.splits["predict"].paths) == PATTERNS[pattern]
    assert (data.splits["predict"].labels == -1).all()


def test_prediction_reads_what_it_can_and_names_the_rest(some):
    data = ImageFolderData(predict="list.txt", image_size=24, num_workers=0)  # on_bad_image is for training
    (batch,) = data.predict_dataloader()
    assert batch["index"].tolist() == [0, 2, 3] and torch.equal(batch["image"][0], batch["image"][2])
    ((index, error),) = batch["bad"]
    assert index == 1 and "nowhere.png" in error


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(("limit", "num"), [(1, 8), (3, 24), (9, 30), (0.5, 16), (0.99, 24), (1.0, 30), (0.25, 8)])
def test_a_limit_leaves_the_same_pictures_on_any_number_of_devices(colours, world_size, limit, num):
    """30 pictures in 4 batches of 8: Lightning's own limit took the first of each device's batches."""
    seen, steps = [], set()
    for rank in range(world_size):
        data = on_device(small(colours, batch_size=8), rank, world_size, limit_test_batches=limit)
        loader = data.test_dataloader()
        left = _parse_num_batches(RunningStage.TESTING, len(loader), data.trainer.limit_test_batches)
        steps.add(left)
        seen += [index for batch in list(loader)[:left] for index in batch["index"].tolist()]
    assert seen == list(range(num))
    assert len(steps) == 1


def test_a_limit_below_one_batch_is_told(colours):
    with pytest.raises(ValueError, match=r"trainer\.limit_test_batches 0\.2 is less than one batch of test"):
        on_device(small(colours, batch_size=8), 0, 2, limit_test_batches=0.2).test_dataloader()


@pytest.mark.parametrize("overfit_batches", [0, 2])
def test_overfitting_takes_the_same_pictures_in_every_epoch(colours, overfit_batches):
    data = on_device(small(colours, batch_size=7, crop_and_flip=True), 0, 1, overfit_batches=overfit_batches)
    epochs = two_epochs(data)
    num = len(epochs) // 2
    first, second = ([batch["index"].tolist() for batch in part[:2]] for part in (epochs[:num], epochs[num:]))
    assert (first == second) == bool(overfit_batches)
    assert not torch.equal(epochs[0]["image"], epochs[num]["image"])  # augmented anew all the same


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_prediction_shares_are_the_parts_of_the_list(some, world_size):
    shares = []
    for rank in range(world_size):
        data = on_device(ImageFolderData(predict=".", image_size=24, num_workers=0, batch_size=2), rank, world_size)
        shares.append(torch.cat([batch["index"] for batch in data.predict_dataloader()]).tolist())
    assert [index for part in shares for index in part] == [0, 1, 2, 3]


def test_file_names_that_are_no_utf8(some):
    name = os.fsdecode(b"a/caf\xe9.png")
    Path(name).write_bytes(Path("top.png").read_bytes())
    Path("names.txt").write_bytes(b"\xef\xbb\xbf" + os.fsencode(name) + b"\n")  # the mark that Windows puts first
    for pattern in ("a", "a/*.png", "names.txt"):
        assert name in ImageFolderData(predict=pattern).splits["predict"].paths


@pytest.mark.parametrize("pattern", ["nowhere", "nowhere/*.png", "empty", "empty.txt"])
def test_nothing_to_predict(some, pattern):
    Path("empty").mkdir()
    Path("empty.txt").write_text("\n \n")
    with pytest.raises(FileNotFoundError) as caught:
        ImageFolderData(predict=pattern)
    assert repr(pattern) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"), [("all.zip", "archive: unpack"), ("all.tar.gz", "archive: unpack"), ("all.CSV", "table: a list")]
)
def test_a_file_of_many_is_named_for_what_it_is(some, name, what):
    if name.endswith("CSV"):
        Path(name).write_text("path\ntop.png\n")
    else:
        shutil.make_archive("all", "zip" if name.endswith("zip") else "gztar", ".", "a")
    with pytest.raises(ValueError, match=rf"^'{name}' is an {what}|^'{name}' is a {what}"):
        ImageFolderData(predict=name)
    # The control: a picture with an archive behind it, as some programs write, is a picture.
    Path("both.any").write_bytes(Path("top.png").read_bytes() + Path(name).read_bytes())
    assert list(ImageFolderData(predict="both.any").splits["predict"].paths) == ["both.any"]


def test_prediction_without_pictures_says_which_flag(colours):
    with pytest.raises(ValueError, match="--data.predict"):
        small(colours).predict_dataloader()


# Data sets with a name


def test_an_existing_folder_is_used_whatever_its_origin(colours, monkeypatch):
    monkeypatch.setattr("finetune.data.datasets.image_folder.fetch_archive", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr("finetune.data.datasets.synthetic.write_sample", lambda *_: pytest.fail("drawn"))
    for data_class in (Hotdog, SampleData):
        assert data_class(str(colours)).class_names == ["blue", "green", "red"]


def test_a_missing_hotdog_folder_is_fetched(colours, tmp_path, monkeypatch):
    asked = []

    def fetch(url: str, sha1: str, root: Path) -> None:
        asked.append((url, sha1))
        root.symlink_to(colours)

    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    monkeypatch.setattr("finetune.data.datasets.image_folder.fetch_archive", fetch)
    assert len(Hotdog().splits["test"].labels) == 30
    assert len(Hotdog().splits["test"].labels) == 30  # now it is there
    assert Path("data/hotdog").is_symlink()
    ((url, sha1),) = asked
    assert url.endswith("/hotdog.zip") and sha1 == "fba480ffa8aa7e0febbb511d181409f899b9baa5"  # the book's


@pytest.mark.parametrize(("task", "num_classes"), [("source", 8), ("target", 2)])
def test_a_missing_sample_folder_is_drawn(tmp_path, monkeypatch, task, num_classes):
    counts = {"train": 2, "val": 1, "test": 1}
    monkeypatch.setattr("finetune.data.datasets.synthetic.write_sample", partial(synthetic.write_sample, counts=counts))
    data = SampleData(str(tmp_path / task))
    assert {split: len(part.labels) for split, part in data.splits.items()} == {
        split: num * num_classes for split, num in counts.items()
    }
    with pytest.raises(ValueError, match="called source or target"):
        SampleData(str(tmp_path / "other"))


@pytest.fixture
def clothes(tmp_path, monkeypatch) -> tuple[Path, dict[str, np.ndarray]]:
    """Sixty and twenty random pictures in the ten classes, packed as the originals are."""
    rng, raw = np.random.default_rng(0), tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    arrays, resources = {}, []
    for split, num in ("train", 60), ("t10k", 20):
        arrays[f"{split}-images-idx3-ubyte"] = rng.integers(0, 256, (num, 28, 28))
        arrays[f"{split}-labels-idx1-ubyte"] = np.arange(num) % 10
    for name, array in arrays.items():
        content = gzip.compress(idx(array))
        (raw / f"{name}.gz").write_bytes(content)
        resources.append((f"{name}.gz", hashlib.md5(content).hexdigest()))
    monkeypatch.setattr(Source, "resources", resources)  # torchvision trusts the sums of the originals alone
    monkeypatch.setattr(Source, "mirrors", ["file:///nowhere/"])  # and would ask its server next
    return tmp_path, arrays


def test_fashion_mnist_from_its_packed_files(clothes):
    root, arrays = clothes
    data = FashionMNIST(str(root), val_fraction=0.25, image_size=32, num_workers=0)
    assert data.class_names[:3] == ["T-shirt or top", "Trouser", "Pullover"] and len(data.class_names) == 10
    labels = arrays["train-labels-idx1-ubyte"]
    names = [f"{label}/{i}" for i in range(6) for label in range(10)]  # the pictures of each class are numbered
    rest, val = stratified(names, labels, (0.25,), 0)
    assert len(rest) + len(val) == 60 and set(np.bincount(labels[val])) <= {1, 2}  # 1.5 of each 6 pictures
    images = {"train": arrays["train-images-idx3-ubyte"][rest], "val": arrays["train-images-idx3-ubyte"][val]}
    images["test"] = arrays["t10k-images-idx3-ubyte"]
    for split, expected in images.items():
        part = data.splits[split]
        assert len(part.labels) == len(part.paths) == len(expected)
        for i, picture in enumerate(expected):
            np.testing.assert_array_equal(part.read(i), np.stack([picture] * 3, axis=-1))
    assert data.splits["val"].labels.tolist() == labels[val].tolist()
    assert list(data.splits["val"].paths) == [f"train/{i}" for i in val] and data.splits["test"].paths[3] == "test/3"
    (batch,) = data.test_dataloader()
    assert batch["image"].shape == (20, 3, 32, 32) and torch.equal(batch["image"][:, 0], batch["image"][:, 2])
    assert data.fingerprint != FashionMNIST(str(root), val_fraction=0.25, split_seed=1).fingerprint != ""


def test_fashion_mnist_that_cannot_be_had(clothes):
    root, _ = clothes
    (root / "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz").write_bytes(b"another file")  # its sum is wrong
    with pytest.raises(OSError, match=r"Fashion-MNIST can't be had.*t10k-labels(.|\n)*put its four .gz files in .*raw"):
        FashionMNIST(str(root))


@pytest.mark.real
def test_the_real_hotdog_folder(caplog):
    with caplog.at_level(logging.WARNING):
        data = Hotdog(str(real_data("hotdog")), val_fraction=0.1, image_size=64, num_workers=0)
    assert data.class_names == ["hotdog", "not-hotdog"] and not caplog.records
    counts = {split: np.bincount(part.labels).tolist() for split, part in data.splits.items()}
    assert counts["test"] == [400, 400] and np.abs(np.subtract(counts["train"], 900)).max() <= 2
    assert np.add(counts["train"], counts["val"]).tolist() == [1000, 1000]
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (64, 3, 64, 64) and batch["bad"] == []
    assert batch["image"].float().mean(dim=(0, 2, 3)).argmax() == 0  # food is red


@pytest.mark.real
def test_the_real_fashion_mnist(tmp_path):
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for packed in (real_data("fashion-mnist") / "FashionMNIST/raw").glob("*.gz"):
        (raw / packed.name).symlink_to(packed)
    data = FashionMNIST(str(tmp_path), val_fraction=0.1, image_size=28)
    counts = {split: np.bincount(part.labels) for split, part in data.splits.items()}
    assert np.abs(counts["val"] - 600).max() <= 6  # one for each power of four
    assert (counts["train"] + counts["val"]).tolist() == [6000] * 10 and counts["test"].tolist() == [1000] * 10
    # The published mean of the 60,000 training pictures, over the two parts.
    pixels = np.concatenate([data.splits[split].read.pixels for split in ("train", "val")])
    assert pixels.mean() / 255 == pytest.approx(0.2860, abs=5e-5)
