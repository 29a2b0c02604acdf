"""The same pixels with and without a cache, for any split, transform and process; every reason for no cache."""

import errno
import io
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import albumentations as A
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from data_files import real_data
from PIL import Image
from processes import launch
from pytorch_lightning.trainer.states import TrainerFn

import finetune
from finetune import ImageFolderData
from finetune.data import image_cache
from finetune.data.dataset import ImageDataset
from finetune.data.datasets.folders import scan
from finetune.data.decode import DecodeError, decode, stored_size
from finetune.data.image_cache import cache_dir, is_worthwhile, read_from_cache
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex
from finetune.data.transforms import eval_transform
from finetune.training.run_limits import fit_limits


@pytest.fixture(autouse=True)
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """An empty folder of caches, in which any data set is worth one."""
    caplog.set_level(logging.INFO, "finetune")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(image_cache, "_MIN_SAVED", 0)
    return tmp_path / "caches"


def draw(root: Path) -> Path:
    """A data set of all kinds of images: rotated, grey, transparent, of the network's own size, and a damaged one."""
    rng = np.random.default_rng(0)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    for split, num in ("train", 12), ("test", 6):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(num):
                height, width = [(24, 24), (30, 41), (64, 48), (24, 90)][i % 4]
                image = Image.fromarray(
                    rng.integers(0, 256, (height // 4, width // 4, 3)).astype(np.uint8)
                )
                image = image.resize((width, height), Image.Resampling.BICUBIC)
                path = root / split / name / f"{i:02d}"
                if i % 3 == 0:
                    image.save(f"{path}.jpg", exif=rotated if i == 3 else Image.Exif())
                else:
                    image.convert("L" if i == 4 else "RGBA" if i == 5 else "RGB").save(
                        f"{path}.png"
                    )
    (root / "train/dog/05.png").write_bytes(b"\x89PNG but no more")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return draw(tmp_path / "data")


def ask(data: ImageFolderData, stage: str = "fit") -> ImageFolderData:
    """Begin a stage."""
    data.trainer.state.fn = TrainerFn(stage)
    data.setup(stage)
    return data


def data_module(root: Path, cached: bool, epochs: int = 3, **options) -> ImageFolderData:
    """Ready to fit."""
    defaults = {"image_size": 24, "batch_size": 5, "num_workers": 0, "on_bad_image": "skip"}
    data = ImageFolderData(str(root), **{**defaults, **options}, cache_limit_gb=1 if cached else 0)
    data.trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False
    )
    return ask(data)


def is_cached(data: ImageFolderData) -> dict[str, bool]:
    return {split: part.cached is not None for split, part in data.splits.items()}


def batches(data: ImageFolderData) -> list[dict]:
    loader, found = data.train_dataloader(), []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        found += list(loader)
    return [*found, *data.val_dataloader(), *data.test_dataloader()]


def assert_same(found: list[dict], expected: list[dict]) -> None:
    for batch, reference in zip(found, expected, strict=True):
        assert all(
            torch.equal(batch[name], reference[name]) for name in ("image", "label", "index")
        )
        assert batch["bad"] == reference["bad"]


def files_of(root: Path) -> dict[str, Samples]:
    return {"train": scan(root)[1]["train"]}


def caches() -> list[Path]:
    return sorted(cache_dir().glob("*.pictures"))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "finetune.data.image_cache"
    ]
    caplog.clear()
    return found


# Pixels


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {
            "resize": "squash",
            "min_crop": 0.35,
            "augmentations": [{"class_path": "ColorJitter", "init_args": {}}],
        },
        {"resize": "whole", "crop_and_flip": False},
        {"cache_size": 24},
        {"cache_size": 26, "resize": "squash"},
    ],
)
def test_a_cache_changes_no_pixel(root, options):
    expected = batches(data_module(root, cached=False, **options))
    for _ in range(2):  # built, then found
        data = data_module(root, cached=True, **options)
        assert is_cached(data) == {"train": True, "val": True, "test": False}
        assert_same(batches(data), expected)
    assert sum(len(batch["bad"]) for batch in expected) >= 1 and len(caches()) == 1


def test_control_other_pixels_are_seen(root, monkeypatch):
    expected = batches(data_module(root, cached=False))
    monkeypatch.setattr(image_cache, "decode", lambda path, **options: decode(path, **options) ^ 1)
    with pytest.raises(AssertionError):
        assert_same(batches(data_module(root, cached=True)), expected)


def test_one_cache_serves_all_splits_of_a_set(root, caplog):
    data_module(root, cached=True, val_fraction=0.2)
    for options in (
        {"val_fraction": 0.5},
        {"val_fraction": 0},
        {"split_seed": 7},
        {"image_size": 32},
    ):
        data = data_module(root, cached=True, **options)
        plain = data_module(root, cached=False, **options)
        assert is_cached(data)["train"]
        for split, part in plain.splits.items():
            for i, path in enumerate(part.paths):
                if path.endswith("dog/05.png"):
                    continue
                np.testing.assert_array_equal(data.splits[split].read(i), part.read(i))
    assert len(caches()) == 1
    (line,) = lines(caplog)
    assert line.startswith("decoded 24 images once") and str(caches()[0]) in line


def test_an_image_that_could_not_be_decoded_gives_the_same_error(root):
    readers = {
        name: data_module(root, cached=name == "cached").splits["train"]
        for name in ("cached", "plain")
    }
    bad = list(readers["plain"].paths).index(str(root / "train/dog/05.png"))
    messages = []
    for part in readers.values():
        with pytest.raises(DecodeError) as caught:
            part.read(bad)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and str(root / "train/dog/05.png") in messages[0]
    item = ImageDataset(
        readers["cached"].read, readers["cached"].targets, eval_transform(24), 0, "skip"
    )[bad]
    assert item["image"] is None and item["error"] == messages[0]


def test_a_transform_that_writes_into_its_input_changes_neither_the_cache_nor_the_pixels(root):
    class Blacken(A.ImageOnlyTransform):
        def apply(self, img: np.ndarray, **params: object) -> np.ndarray:
            img[:2] = 0
            return img

    readers = {
        name: data_module(root, cached=name == "cached").splits["train"]
        for name in ("cached", "plain")
    }
    transform = A.Compose([Blacken(p=1), A.RandomResizedCrop((24, 24))])
    for key in [(0, 0), (0, 0), (1, 3)]:  # again: what was written must not be seen
        cached, plain = (
            ImageDataset(part.read, part.targets, transform)[key]["image"]
            for part in readers.values()
        )
        np.testing.assert_array_equal(cached, plain)
    with pytest.raises(ValueError, match="read-only"):  # the control: it does write
        Blacken(p=1)(image=readers["cached"].read(0))


def test_an_error_of_a_transform_is_still_its_error(root):
    class Fails(A.ImageOnlyTransform):
        def apply(self, img: np.ndarray, **params: object) -> np.ndarray:
            raise KeyError("a mistake")

    part = data_module(root, cached=True).splits["train"]
    with pytest.raises(KeyError, match="a mistake"):
        ImageDataset(part.read, part.targets, A.Compose([Fails(p=1)]))[0]


# Which cache


def test_a_file_that_changed_means_another_cache(root, caplog):
    def number() -> int:
        read_from_cache(files_of(root), root, 1, build=True)
        return len(caches())

    path = root / "train/cat/01.png"
    content, before = path.read_bytes(), path.stat()
    assert number() == number() == 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert number() == 2
    path.write_bytes(content + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert number() == 3
    path.read_bytes()
    assert number() == 3  # the control: reading changes nothing
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert number() == 4  # of the first size and time: the file system has a time of its own
    path.rename(path.with_name("zz.png"))
    assert number() == 5
    assert len(lines(caplog)) == 5


def test_other_settings_and_places_mean_another_cache(root, tmp_path, monkeypatch):
    train = files_of(root)["train"]
    for number, shorter_side in enumerate([None, 30, 31], start=1):
        reduced = replace(train, shorter_side=shorter_side)
        assert read_from_cache({"train": reduced}, root, 1, build=True)
        assert len(caches()) == number
    shutil.copytree(root, tmp_path / "copy")  # with the same times
    assert not read_from_cache(files_of(tmp_path / "copy"), tmp_path / "copy", 1, build=False)
    for decoder in image_cache.PIL, image_cache.simplejpeg, finetune:
        with monkeypatch.context() as patched:
            patched.setattr(decoder, "__version__", "another")
            assert not read_from_cache({"train": train}, root, 1, build=False)
    assert read_from_cache({"train": train}, root, 1, build=False)  # the control: all as it was


def test_the_folder_may_be_named_in_any_way(root, monkeypatch):
    monkeypatch.chdir(root)
    read_from_cache(files_of(root), root, 1, build=True)
    for name in (".", "./", "../data", "./../data", f"{root}/", f"{root.parent}//data"):
        assert read_from_cache(files_of(Path(name)), name, 1, build=False)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "half":
        del content[len(content) // 2 :]
    elif how == "index":
        content[-150] ^= 1
    path.write_bytes(b"" if how == "empty" else content)


@pytest.mark.parametrize("how", ["half", "index", "empty"])
def test_a_damaged_cache_is_noticed_and_made_anew(root, how, caplog):
    read_from_cache(files_of(root), root, 1, build=True)
    (path,) = caches()
    full = path.read_bytes()
    damage(path, how)
    lines(caplog)
    assert not read_from_cache(files_of(root), root, 1, build=False)
    assert read_from_cache(files_of(root), root, 1, build=True)
    assert path.read_bytes() == full
    assert "damaged" in lines(caplog)[0]


# When


@pytest.mark.parametrize(
    ("options", "num", "worth"),
    [
        ({"max_epochs": 1}, 5000, False),
        ({"max_epochs": 2}, 5000, True),
        ({"max_epochs": -1}, 5000, True),
        ({"max_epochs": 50}, 20, False),  # saves less than a second
        ({"max_epochs": 51}, 20, True),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 5000, False),
        ({"max_epochs": 4, "limit_train_batches": 0.5}, 5000, True),
        ({"max_epochs": 9, "limit_train_batches": 10}, 5000, False),
        ({"max_epochs": 3, "limit_train_batches": 0}, 5000, False),
        ({"max_epochs": -1, "max_steps": 999}, 5000, False),  # of 10 images
        ({"max_epochs": -1, "max_steps": 1000}, 5000, True),
        ({"max_epochs": -1, "max_steps": 500, "accumulate_grad_batches": 2}, 5000, True),
    ],
)
def test_a_cache_pays_from_the_second_epoch_on(monkeypatch, options, num, worth):
    monkeypatch.setattr(image_cache, "_MIN_SAVED", 1000)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    assert is_worthwhile(fit_limits(trainer).num_reads(num, batch_size=10), num) == worth


@pytest.mark.parametrize(
    ("stage", "epochs"), [("fit", 1), ("validate", 3), ("test", 3), ("predict", 3)]
)
def test_what_reads_once_builds_nothing_and_uses_what_there_is(root, stage, epochs):
    data = data_module(root, cached=False, epochs=epochs)
    data.cache_limit_gb = 1
    ask(data, stage)
    assert caches() == [] and not any(is_cached(data).values())
    read_from_cache(data.splits, root, 1, build=True)
    ask(data, stage)
    # the others read the test images or those to predict, which are in no cache
    is_used = stage in ("fit", "validate")
    assert is_cached(data) == {"train": is_used, "val": is_used, "test": False}


def test_only_setup_builds_a_cache(root):
    data = data_module(root, cached=False)
    data.cache_limit_gb = 1
    before = dict(data.splits)
    assert len(data.image_dataset("train", train=True)) == len(data.image_dataset("train"))
    data.train_dataloader()
    data.val_dataloader()
    assert caches() == [] and all(data.splits[split] is before[split] for split in before)
    data.setup("fit")  # the control
    assert len(caches()) == 1 and is_cached(data)["train"]


def test_predictions_have_no_cache(root):
    data = ImageFolderData(predict=str(root / "test"), image_size=24)
    data.trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False
    )
    data.setup("predict")
    data.image_dataset("predict")
    assert not cache_dir().exists()


# Where there is none


@pytest.fixture
def small_disk(tmp_path: Path, folder: Path) -> Iterator[Path]:
    """A disk of 24 kB for the caches; if it cannot be mounted, the same limit on every file."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode == 0:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, before[1]))
        yield folder
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_run_without_a_cache(root, small_disk, caplog, monkeypatch):
    expected = batches(data_module(root, cached=False))
    monkeypatch.setattr(
        image_cache, "available_bytes", lambda folder: 1e9
    )  # it fills up while we write
    data = data_module(root, cached=True)
    assert not any(is_cached(data).values()) and os.listdir(small_disk) == []
    (line,) = lines(caplog)
    assert (
        str(root) in line
        and "no cache" in line
        and ("No space left" in line or "File too large" in line)
    )
    assert caplog.records == []
    assert_same(batches(data), expected)


@pytest.mark.parametrize("limit", ["cache_limit_gb", "free disk"])
def test_a_data_set_above_the_limit_stays_undecoded(root, limit, caplog, monkeypatch):
    # 24 images of some 2,000 pixels: 0.16 MB.
    if limit == "free disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    limit_gb = 0.0001 if limit == "cache_limit_gb" else 1
    assert read_from_cache(files_of(root), root, limit_gb, build=True) == {}
    (line,) = lines(caplog)
    assert str(root) in line and limit in line and "0.0001 GB" in line and "\n" not in line
    assert not cache_dir().exists()


def test_the_limit_holds_while_writing_too(root, caplog, monkeypatch):
    monkeypatch.setattr(image_cache, "_estimate", lambda *_: 0.0)
    assert read_from_cache(files_of(root), root, 0.0001, build=True) == {}
    assert "more than" in lines(caplog)[0] and not cache_dir().exists()


@pytest.mark.parametrize("shorter_side", [None, 30])
def test_the_estimate_is_about_right(root, shorter_side):
    paths = list(files_of(root)["train"].paths)
    good = [path for path in paths if not path.endswith("dog/05.png")]
    real = sum(decode(path, shorter_side=shorter_side).nbytes for path in good)
    # sides are rounded
    assert image_cache._estimate(paths, shorter_side) == pytest.approx(real, rel=0.02)
    # by a sample
    assert image_cache._estimate(paths * 40, shorter_side) == pytest.approx(40 * real, rel=0.15)


def test_a_folder_that_may_not_be_written_to(root, folder, caplog):
    folder.write_text("a file")
    assert read_from_cache(files_of(root), root, 1, build=True) == {}
    (line,) = lines(caplog)
    assert "no cache" in line and str(folder) in line and folder.read_text() == "a file"


def test_a_limit_of_zero_means_none(root):
    assert read_from_cache(files_of(root), root, 0, build=True) == {} and not cache_dir().exists()


# Several processes


@pytest.mark.slow
def test_of_several_ranks_one_builds_and_all_read(root, tmp_path):
    out = launch("cache_scenarios.py", tmp_path / "out", 2, root)
    logs = [(out / f"log{rank}").read_text() for rank in range(2)]
    # A full disk first: where one failed the others do not try again.
    assert sum(log.count("No space left on device") for log in logs) == 1, logs
    results = [[line for line in log.splitlines() if line.endswith("cached")] for log in logs]
    assert results == [["uncached", "cached"]] * 2, logs
    assert sum(log.count("decoded 24 images once") for log in logs) == 1
    assert len(caches()) == 1
    weights = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("how", ["stopped", "killed", "failed"])
def test_who_waited_makes_what_another_was_stopped_at(root, monkeypatch, caplog, how):
    ends = {
        "stopped": KeyboardInterrupt(),
        "failed": OSError(errno.ENOSPC, "No space left on device"),
    }

    def end(path: str, **_: object) -> np.ndarray:
        if how == "killed":
            os._exit(9)
        raise ends[how]

    with monkeypatch.context() as patched:
        patched.setattr(image_cache, "decode", end)
        if how == "killed":
            process = multiprocessing.get_context("fork").Process(
                target=read_from_cache, args=(files_of(root), root, 1, True)
            )
            process.start()
            process.join(60)
            assert process.exitcode == 9
        else:
            with pytest.raises(KeyboardInterrupt) if how == "stopped" else nullcontext():
                read_from_cache(files_of(root), root, 1, build=True)
    lines(caplog)
    # as who waited for that one
    monkeypatch.setattr(image_cache, "one_at_a_time", lambda path: nullcontext(True))
    readers = read_from_cache(files_of(root), root, 1, build=True)
    (line,) = lines(caplog)
    if how == "failed":
        assert not readers and line.endswith(
            "decoded again in every epoch: no cache, another process could not make it"
        )
    else:
        assert line.startswith("decoded 24 images once") and len(caches()) == 1
        assert "train" in readers and not list(cache_dir().glob(".*.tmp"))


def test_workers_share_one_copy(root):
    samples = data_module(root, cached=True).splits["train"]
    content = pickle.dumps(samples)  # for a spawned worker
    assert len(content) < 5000 < samples.cached.images.path.stat().st_size
    np.testing.assert_array_equal(pickle.loads(content).read(0), samples.read(0))
    # the file itself, not what was read of it
    assert str(samples.cached.images.path) in Path("/proc/self/maps").read_text()


def test_the_index_of_a_data_set_takes_at_most_200_bytes_an_image(tmp_path, monkeypatch):
    def not_there(path: str, **_: object) -> np.ndarray:
        raise DecodeError(path)

    monkeypatch.setattr(image_cache, "decode", not_there)
    num = 5_000
    tracemalloc.start()
    # As long as those of ImageNet.
    paths = PathList(f"/data/imagenet/train/n01440764/n01440764_{i:05d}.JPEG" for i in range(num))
    train = Samples(paths, ClassIndex(np.zeros(num, np.int64), 1))
    cached = read_from_cache({"train": train}, "/data/imagenet", 1, build=True)
    assert len(cached["train"].cached.images) == num == len(train)
    num_bytes = tracemalloc.get_traced_memory()[0] / num
    tracemalloc.stop()
    assert 60 < num_bytes < 100  # next to 16 of the mapped file; measured: 75


def test_use_is_remembered(root):
    read_from_cache(files_of(root), root, 1, build=True)
    (path,) = caches()
    os.utime(path, (0, 0))
    read_from_cache(files_of(root), root, 1, build=False)
    assert time.time() - path.stat().st_mtime < 100


# Smaller images


def test_test_images_are_never_made_smaller(root):
    data = data_module(root, cached=True, cache_size=24)
    sizes = {
        split: [min(part.read(i).shape[:2]) for i in (0, 1)] for split, part in data.splits.items()
    }
    assert sizes == {"train": [24, 24], "val": [24, 24], "test": [24, 30]}
    assert data.hparams["cache_size"] == 24  # another network would come of it
    with pytest.raises(ValueError, match="cache_size 23 must be at least image_size, 24"):
        data_module(root, cached=True, cache_size=23)


def jpeg(pixels: np.ndarray, orientation: int = 1) -> bytes:
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95, subsampling=0, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    ("height", "width"), [(203, 399), (400, 207), (399, 400), (201, 201), (49, 99), (33, 65)]
)
def test_a_smaller_image_keeps_its_proportions_and_place(height, width, orientation):
    y, x = np.mgrid[:height, :width]
    # A slope has the same mean over any area: the average is known, and half a pixel's shift would show.
    pixels = np.stack([x * 250 / width, y * 250 / height, 0 * x + 99], axis=-1).astype(np.uint8)
    found = decode(jpeg(pixels, orientation), shorter_side=32)
    shape = (height, width) if orientation == 1 else (width, height)
    expected = [round(side * (32 / min(shape))) for side in shape]
    assert list(found.shape[:2]) == expected
    upright = pixels if orientation == 1 else np.rot90(pixels, -1)
    reference = Image.fromarray(upright).resize(expected[::-1], Image.Resampling.BOX)
    difference = found - np.asarray(reference, float)
    assert np.abs(difference).mean() < 1.5  # JPEG's own error at quality 95
    # a shift of half a pixel would be two or more
    assert np.abs(difference.mean(axis=(0, 1))).max() < 0.7


def test_small_images_are_not_made_larger(root):
    path = str(root / "train/cat/01.png")
    np.testing.assert_array_equal(decode(path, shorter_side=30), decode(path))
    assert stored_size(path) == (30, 41) and stored_size(str(root / "train/dog/05.png")) == (0, 0)
    assert stored_size(str(root / "nowhere.png")) == (0, 0)


@pytest.mark.real
@pytest.mark.parametrize(
    ("image_size", "cache_size", "bound"), [(112, 128, 0.0), (56, 64, 6), (32, 37, 6), (48, 64, 20)]
)
def test_on_photographs_smaller_images_are_evaluated_nearly_alike(image_size, cache_size, bound):
    """Mean absolute difference of an image after the evaluation transform, in grey levels: the largest of 100 images.

    At 8/7 of the image size (128 for 112) the evaluation transform has nothing left to resize. Only JPEGs of at least
    four times that size differ, because they are decoded at a fraction. Other sizes are averaged a second time.
    """
    transform = eval_transform(image_size)
    differences = []
    for path in sorted(real_data("hotdog").glob("train/*/*.jpg"))[::20]:
        full, small = (
            transform(image=decode(path, shorter_side=side))["image"] for side in (None, cache_size)
        )
        differences.append(np.abs(full.astype(int) - small).mean())
    assert len(differences) == 100 and max(differences) <= bound
    assert (max(differences) > 0) == (bound > 0)
