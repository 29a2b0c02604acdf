"""A cache of decoded images changes no pixel; if it cannot be made, the run goes on without it and says why."""

import io
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import albumentations as A
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

import finetune
from finetune import ImageFolderData
from finetune.data import image_cache
from finetune.data.batch_limits import FitLimits
from finetune.data.dataset import ImageDataset
from finetune.data.decode import decode
from finetune.data.image_cache import is_worthwhile, read_from_cache
from finetune.data.transforms import eval_transform, train_transform
from finetune.system.cache_dir import cache_dir

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """An empty folder of caches."""
    caplog.set_level(logging.INFO, "finetune.data.image_cache")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data set of all kinds of images: rotated, grey, transparent, of the network's own size, and a damaged one."""
    root = tmp_path / "data"
    rng = np.random.default_rng(0)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    for split, num in (("train", 12), ("test", 6)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(num):
                height, width = [(24, 24), (30, 41), (64, 48), (24, 90)][i % 4]
                coarse = rng.integers(0, 256, (height // 4, width // 4, 3)).astype(np.uint8)
                image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
                path = root / split / name / f"{i:02d}"
                if i % 3 == 0:
                    image.save(f"{path}.jpg", exif=rotated if i == 3 else Image.Exif())
                else:
                    kind = {4: "L", 5: "RGBA"}.get(i, "RGB")
                    image.convert(kind).save(f"{path}.png")
    (root / "train/dog/05.png").write_bytes(b"\x89PNG but no more")
    return root


def data_module(root: Path, is_cached: bool = False, **options: object) -> ImageFolderData:
    """Images that are ready to fit, after their cache was made if they are to have one."""
    defaults = {"image_size": 24, "batch_size": 5, "num_workers": 0, "on_bad_image": "skip"}
    options = {**defaults, **options}
    if is_cached:
        build(root, **options)
    data = ImageFolderData(str(root), **options, cache_limit_gb=int(is_cached))
    data.trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False
    )
    data.setup("fit")
    return data


def build(root: object, limit_gb: float = 1, build: bool = True, **options: object) -> dict:
    data = ImageFolderData(str(root), **options)
    return read_from_cache(data.splits, data.root, limit_gb, build)


def is_found(root: object, **options: object) -> bool:
    return bool(build(root, build=False, **options))


def pixels(data: ImageFolderData) -> list[dict]:
    found: list[dict] = []
    loader = data.train_dataloader()
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        found += list(loader)
    return [*found, *data.val_dataloader(), *data.test_dataloader()]


def are_same(first: list[dict], second: list[dict]) -> bool:
    names = ("image", "label", "index")
    return len(first) == len(second) and all(
        all(torch.equal(one[name], two[name]) for name in names) and one["bad"] == two["bad"]
        for one, two in zip(first, second, strict=True)
    )


def caches() -> list[Path]:
    return sorted(cache_dir().glob("*.images"))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "finetune.data.image_cache"
    return [record.getMessage() for record in caplog.records if record.name == name]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"resize": "squash", "min_crop": 0.35, "augmentations": [{"class_path": "ColorJitter"}]},
        {"resize": "whole", "crop_and_flip": False},
    ],
)
def test_a_cache_changes_no_pixel(root, options):
    expected = pixels(data_module(root, **options))
    data = data_module(root, is_cached=True, **options)
    is_cached = {split: part.cached is not None for split, part in data.splits.items()}
    assert is_cached == {"train": True, "val": True, "test": False}
    assert are_same(pixels(data), expected)
    assert sum(len(batch["bad"]) for batch in expected) >= 1 and len(caches()) == 1


def test_control_other_pixels_are_seen(root, monkeypatch):
    expected = pixels(data_module(root))
    monkeypatch.setattr(image_cache, "decode", lambda path, **options: decode(path, **options) ^ 1)
    assert not are_same(pixels(data_module(root, is_cached=True)), expected)


def test_a_transform_that_writes_into_its_input_does_not_change_the_cache(root):
    class Blacken(A.ImageOnlyTransform):
        def apply(self, img: np.ndarray, **params: object) -> np.ndarray:
            img[:2] = 0
            return img

    parts = [data_module(root, is_cached).splits["train"] for is_cached in (True, False)]
    prepared = eval_transform(24, "whole")
    transform = A.Compose([*train_transform(24, prepared=prepared).transforms, Blacken(p=1)])
    for key in [(0, 0), (0, 0), (1, 3)]:  # again: what was written must not be seen
        images = [ImageDataset(part.read, part.targets, transform)[key]["image"] for part in parts]
        np.testing.assert_array_equal(*images)
    with pytest.raises(ValueError, match="read-only"):  # the control: it does write
        Blacken(p=1)(image=parts[0].read(0))


def test_a_cache_is_that_of_the_files_the_place_and_the_decoders(root, tmp_path, monkeypatch):
    build(root)
    path = root / "train/cat/01.png"
    times = path.stat()
    changes: list[Callable[[], object]] = [
        lambda: os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1)),
        lambda: path.write_bytes(path.read_bytes() + b"x"),
        lambda: path.rename(path.with_name("zz.png")),
    ]
    for change in changes:
        assert is_found(root)
        change()
        assert not is_found(root)
        build(root)
    shutil.copytree(root, tmp_path / "copy")  # with the same times
    assert not is_found(tmp_path / "copy")
    for decoder in (image_cache.PIL, image_cache.simplejpeg, finetune):
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "__version__", "another")
            assert not is_found(root)
    monkeypatch.chdir(root)
    for name in (".", "../data", f"{root}/"):  # the controls
        assert is_found(name)
    assert is_found(root, val_fraction=0.5, split_seed=7)


@pytest.mark.parametrize("how", ["half", "index", "empty"])
def test_a_damaged_cache_is_made_anew(root, how, caplog):
    build(root)
    (path,) = caches()
    content = path.read_bytes()
    index = content[:-150] + bytes([content[-150] ^ 1]) + content[-149:]
    path.write_bytes({"half": content[: len(content) // 2], "index": index, "empty": b""}[how])
    caplog.clear()
    assert not is_found(root)
    assert build(root)
    assert path.read_bytes() == content and "damaged" in lines(caplog)[0]


@pytest.mark.parametrize(
    ("options", "num", "is_worth_it"),
    [
        ({"max_epochs": 1}, 5000, False),
        ({"max_epochs": 2}, 5000, True),
        ({"max_epochs": 50}, 20, False),  # saves less than a second
        ({"max_epochs": 51}, 20, True),
        ({"max_epochs": 9, "limit_train_batches": 10}, 5000, False),
        ({"max_epochs": -1, "max_steps": 999}, 5000, False),  # of 10 images
        ({"max_epochs": -1, "max_steps": 1000}, 5000, True),
        ({"max_epochs": -1, "max_steps": 500, "batches_per_step": 2}, 5000, True),
    ],
)
def test_a_cache_is_made_for_a_fit_that_reads_images_again(options, num, is_worth_it):
    assert is_worthwhile(FitLimits(**options).num_reads(num, batch_size=10), num) == is_worth_it


@pytest.mark.parametrize("why", ["full disk", "no folder", "limit", "free disk", "no cache"])
def test_without_a_cache_a_fit_goes_on_and_says_why(root, folder, why, caplog, monkeypatch):
    expected = pixels(data_module(root))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if why == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, limits[1]))
    elif why == "no folder":
        folder.write_text("a file")
    elif why == "free disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    limit_gb = {"limit": 0.0001, "no cache": 0}.get(why, 1)
    try:
        assert build(root, limit_gb) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert are_same(pixels(data_module(root)), expected)
    words = {"no folder": str(folder), "limit": "--data.cache_limit_gb", "full disk": "large"}
    found = lines(caplog)
    assert len(found) == (why != "no cache")
    assert all(str(root) in line and words.get(why, why) in line for line in found)
    assert folder.is_file() if why == "no folder" else not list(folder.rglob("*.*"))


def slowly_decoded(calls: Path) -> Callable[..., np.ndarray]:
    """Return a `decode` that takes time, so that processes meet, and that counts its calls in a file."""

    def slow(source: object, **options: object) -> np.ndarray:
        with calls.open("a") as file:
            file.write("x")
        time.sleep(0.02)
        return decode(source, **options)

    return slow


def test_of_several_processes_one_makes_the_cache(root, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    monkeypatch.setattr(image_cache, "num_cores", lambda: 1)
    monkeypatch.setattr(image_cache, "decode", slowly_decoded(calls))
    results = FORK.SimpleQueue()
    processes = [FORK.Process(target=lambda: results.put(len(build(root)))) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [results.get(), results.get()] == [2, 2]
    assert 24 <= len(calls.read_text()) < 48 and len(caches()) == 1


def test_a_cache_that_a_killed_process_has_begun_is_made_by_the_next(root, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    with monkeypatch.context() as patch:
        patch.setattr(image_cache, "decode", slowly_decoded(calls))
        process = FORK.Process(target=build, args=(root,))
        process.start()
        while not calls.exists():
            time.sleep(0.001)
        process.kill()
        process.join(60)
        assert process.exitcode != 0
    assert not caches()
    assert build(root) and len(caches()) == 1
    assert not list(cache_dir().glob(".*.tmp"))


def test_workers_share_one_copy_of_the_pixels(root):
    samples = data_module(root, is_cached=True).splits["train"]
    content = pickle.dumps(samples)  # for a spawned worker
    (path,) = caches()
    assert len(content) < 5000 < path.stat().st_size
    np.testing.assert_array_equal(pickle.loads(content).read(0), samples.read(0))
    assert str(path) in Path("/proc/self/maps").read_text()  # the file itself


def test_the_use_of_a_cache_is_remembered(root):
    build(root)
    (path,) = caches()
    os.utime(path, (0, 0))
    assert is_found(root)
    assert time.time() - path.stat().st_mtime < 100


def jpeg(pixels: np.ndarray, orientation: int) -> bytes:
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95, subsampling=0, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    ("height", "width"), [(203, 399), (400, 207), (399, 400), (201, 201), (49, 99), (33, 65)]
)
def test_an_image_that_is_decoded_smaller_is_that_of_pillow(height, width, orientation):
    y, x = np.mgrid[:height, :width]
    # A slope has the same mean over any area: the average is known, and half a pixel's shift would show.
    pixels = np.stack([x * 250 / width, y * 250 / height, 0 * x + 99], axis=-1).astype(np.uint8)
    found = decode(jpeg(pixels, orientation), shorter_side=32)
    upright = pixels if orientation == 1 else np.rot90(pixels, -1)
    expected = [round(side * (32 / min(upright.shape[:2]))) for side in upright.shape[:2]]
    assert list(found.shape[:2]) == expected
    reference = Image.fromarray(upright).resize(expected[::-1], Image.Resampling.BOX)
    difference = found - np.asarray(reference, float)
    assert np.abs(difference).mean() < 1.5  # JPEG's own error at quality 95
    # a shift of half a pixel would be two or more
    assert np.abs(difference.mean(axis=(0, 1))).max() < 0.7
