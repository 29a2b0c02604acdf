"""The image size of an epoch depends only on epoch and run length, with workers, mixing and a cache as without."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from data_files import small

from finetune.data.image_cache import read_from_cache
from finetune.data.samplers import augmentation_seed
from finetune.data.size_schedule import SizeSchedule, build_schedule, parse_sizes
from finetune.data.transforms import eval_transform, set_random_seed, train_transform
from finetune.system.messages import WrongUsage

SIZES = (16, 40, 24)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("max_epochs", [4, 5, 12, 15, 31])
def test_each_size_has_an_equal_share_of_the_epochs_in_order(num, max_epochs):
    sizes = list(range(80, 80 - num, -1))
    schedule = SizeSchedule(sizes, max_epochs)
    seen = [schedule.at(epoch) for epoch in range(max_epochs)]
    assert seen == sorted(seen, reverse=True) and set(seen) == set(sizes)
    counts = Counter(seen).values()
    assert max(counts) - min(counts) <= 1
    assert schedule.at(max_epochs) == schedule.at(10 * max_epochs) == sizes[-1]
    spans = {}  # what is reported, read again
    for part in schedule.describe().split(", "):
        size, _, _, *numbers = part.replace(" to ", " ").split()
        spans[int(size)] = range(int(numbers[0]) - 1, int(numbers[-1]))
    assert [size for size, span in spans.items() for _ in span] == seen


@pytest.mark.parametrize("given", ["96,128", "96, 128", [96, 128], (96, 128)])
def test_sizes_are_given_as_a_list_or_as_text(given):
    assert parse_sizes(given, 128) == (96, 128)
    assert parse_sizes(None, 128) == ()
    assert parse_sizes("128", 128) == (128,)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"value": ""}, "takes sizes in pixels, such as 96,128, not ''"),
        ({"value": []}, r"takes sizes in pixels, such as 96,128, not \[\]"),
        ({"value": "96;128"}, "takes sizes in pixels"),
        ({"value": [-96, 128]}, "takes sizes in pixels"),
        ({"value": "4,128"}, "must be at least 8, got 4,128"),
        ({"image_size": 224}, "ends at 128, and image_size is 224: set --data.image_size 128"),
    ],
)
def test_what_is_no_schedule_is_reported(options, reported):
    right: dict[str, Any] = {"value": "96,128", "image_size": 128}
    parse_sizes(**right)
    with pytest.raises(WrongUsage, match=reported):
        parse_sizes(**{**right, **options})


@pytest.mark.parametrize("max_epochs", [None, -1, 0, 1])
def test_a_run_without_epochs_or_with_too_few_is_reported(max_epochs):
    reported = (
        "set trainer.max_epochs"
        if max_epochs in (None, -1)
        else f"has 2 sizes, more than trainer.max_epochs {max_epochs}: use fewer"
    )
    with pytest.raises(WrongUsage, match=reported):
        build_schedule((96, 128), max_epochs)
    assert build_schedule((), max_epochs) is None
    assert build_schedule((96, 128), max_epochs, is_fast_dev_run=True) is None


def test_a_try_has_the_size_that_a_schedule_ends_with(colours):
    data = sample_images(colours)
    data.trainer = pl.Trainer(
        fast_dev_run=True, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    assert next(iter(data.train_dataloader()))["image"].shape[1:] == (3, 24, 24)


def sample_images(root, max_epochs=6, **options):
    given = {
        "image_size": 24,
        "image_size_schedule": list(SIZES),
        "val_fraction": 0.2,
        "batch_size": 13,
        **options,
    }
    data = small(root, **given)
    data.trainer = pl.Trainer(
        max_epochs=max_epochs, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    return data


def epochs(data, num=6) -> list[list[dict[str, Any]]]:
    loader, found = data.train_dataloader(), []
    for epoch in range(num):
        loader.batch_sampler.set_epoch(epoch)
        found.append(list(loader))
    return found


def test_workers_that_stay_give_each_epoch_its_size_and_the_same_pixels(colours):
    plain, by_worker = epochs(sample_images(colours)), epochs(sample_images(colours, num_workers=1))
    for epoch, (batches, others) in enumerate(zip(plain, by_worker, strict=True)):
        for batch, other in zip(batches, others, strict=True):
            side = (16, 16, 40, 40, 24, 24)[epoch]
            assert batch["image"].shape[1:] == (3, side, side)
            assert torch.equal(batch["image"], other["image"]) and torch.equal(
                batch["index"], other["index"]
            )


def test_pixels_are_those_of_a_run_that_has_this_size_all_along(colours):
    scheduled = sample_images(colours).image_dataset("train", train=True)
    for epoch, side in enumerate((16, 16, 40, 40, 24, 24)):
        alone = sample_images(colours, image_size=side, image_size_schedule=None).image_dataset(
            "train", train=True
        )
        transform = train_transform(side)
        for index in (0, 7):
            image = scheduled[epoch, index]["image"]
            np.testing.assert_array_equal(image, alone[epoch, index]["image"])
            set_random_seed(transform, augmentation_seed(0, epoch, index))
            np.testing.assert_array_equal(image, transform(image=scheduled.read(index))["image"])
    assert scheduled[0]["image"].shape == (24, 24, 3)  # asked for by no epoch


def test_without_random_transforms_the_size_changes_all_the_same(colours):
    data = sample_images(colours, crop_and_flip=False)
    shown = data.image_dataset("train", train=True)
    image = shown.read(3)
    for epoch, side in ((0, 16), (2, 40), (5, 24)):
        np.testing.assert_array_equal(
            shown[epoch, 3]["image"], eval_transform(side)(image=image)["image"]
        )


@pytest.mark.parametrize("mixing", [{"mixup": 0.4}, {"cutmix": 1.0}])
def test_a_partner_has_the_size_of_its_epoch(colours, mixing):
    for epoch, batches in enumerate(epochs(sample_images(colours, **mixing))):
        assert {batch["image"].shape[-1] for batch in batches} == {(16, 16, 40, 40, 24, 24)[epoch]}
        assert all("share" in batch for batch in batches)


def test_a_cache_changes_no_pixel(colours, tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    options = {"cache_size": 40, "cache_limit_gb": 0}
    expected, cached = epochs(sample_images(colours, **options)), sample_images(colours, **options)
    cached.splits.update(read_from_cache(cached.splits, colours, 1.0, build=True))
    assert cached.splits["train"].cached is not None
    for batches, others in zip(expected, epochs(cached), strict=True):
        assert all(
            torch.equal(a["image"], b["image"]) for a, b in zip(batches, others, strict=True)
        )
    with pytest.raises(WrongUsage, match="cache_size 39 must be at least image_size_schedule, 40"):
        sample_images(colours, cache_size=39)
    with pytest.raises(WrongUsage, match="cache_size 40 must be at least eval_image_size, 41"):
        sample_images(colours, cache_size=40, eval_image_size=41)


@pytest.mark.parametrize("eval_image_size", [None, 32])
def test_evaluation_has_a_size_of_its_own(colours, eval_image_size):
    data, side = sample_images(colours, eval_image_size=eval_image_size), eval_image_size or 24
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        images = torch.cat([batch["image"] for batch in loader]).permute(0, 2, 3, 1).numpy()
        assert images.shape[1:] == (side, side, 3)
        for i in (0, len(images) - 1):
            expected = eval_transform(side)(image=data.splits[split].read(i))["image"]
            np.testing.assert_array_equal(images[i], expected)
    shown = small(
        colours, predict=str(colours / "test"), image_size=24, eval_image_size=eval_image_size
    )
    assert next(iter(shown.predict_dataloader()))["image"].shape[-1] == side


def test_a_batch_of_no_image_has_the_size_that_training_ends_at(colours):
    assert sample_images(colours).collate([])["image"].shape == (0, 3, 24, 24)
