"""The same pixels for any number of workers and devices, skipped and refused images, fixed views."""

import multiprocessing
import queue
from itertools import chain
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from data_files import small
from promise import control, promise
from pytorch_lightning.trainer.connectors.data_connector import _parse_num_batches
from pytorch_lightning.trainer.states import RunningStage

from finetune.data import datamodule
from finetune.data.datamodule import ImageDataModule, position
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.decode import DecodeError
from finetune.data.samplers import train_order
from finetune.data.transforms import eval_transform


def on_device(
    data: ImageDataModule, rank: int, world_size: int, **limits: float
) -> ImageDataModule:
    """The data module as device `rank` of `world_size` sees it, at the start of a run."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **limits
    )
    names = ("overfit_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
    data.trainer = SimpleNamespace(
        **{
            "global_rank": rank,
            "world_size": world_size,
            "num_devices": 1,
            "strategy": trainer.strategy,
        },
        **{
            "fit_loop": trainer.fit_loop,
            "state": trainer.state,
            **{name: getattr(trainer, name) for name in names},
        },
    )
    return data


# Splits


@promise("equal-ranks")
def test_ranks_that_found_different_labels_all_raise(colours, tmp_path, monkeypatch):
    """As with a file of corrections that grows while the ranks start."""
    file = tmp_path / "corrections.csv"
    file.write_text("path,was,now\ntrain/blue/00.png,blue,red\n")
    first = small(colours, corrections=str(file))
    same = small(colours, corrections=str(file))
    file.write_text(file.read_text() + "test/red/01.png,red,blue\n")
    unchanged = small(colours, corrections=str(file))  # test images are not corrected
    file.write_text(file.read_text() + "train/red/01.png,red,excluded\n")
    grown = small(colours, corrections=str(file))
    digests: list[str] = []

    def gather(of_ranks, mine):
        digests.append(mine)
        of_ranks[:] = digests[-2:]

    monkeypatch.setattr(datamodule.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(datamodule.dist, "all_gather_object", gather)
    for rank, data in enumerate((first, same, unchanged)):
        on_device(data, rank % 2, 2).setup("fit")
    with pytest.raises(
        ValueError, match="the processes found different images or labels in .*colours"
    ):
        on_device(grown, 1, 2).setup("fit")


def test_no_validation_is_wanted_or_given(colours):
    data = small(colours, val_fraction=0)
    assert "val" not in data.splits and len(data.splits["train"]) == 60
    assert data.val_dataloader() == []


@pytest.mark.parametrize(  # test_data_settings.py has all
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size .* got 0"),
        ({"val_fraction": 1.0}, "^val_fraction must be at least 0 and below 1, got 1.0"),
        ({"augmentations": [{"class_path": "Nope"}]}, "no transform 'Nope'"),
    ],
)
def test_values_that_make_no_sense(colours, options, words):
    with pytest.raises(ValueError, match=words):
        small(colours, **options)


# Batches


def two_epochs(data: ImageDataModule) -> list[dict]:
    loader, batches = data.train_dataloader(), []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        batches += list(loader)
    return batches


@promise("random-numbers")
# A real warning for a person who asks for it, and here the purpose: more workers than cores.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_number_of_workers_changes_no_pixel(few, num_workers):
    options = {"batch_size": 5, "val_fraction": 0, "on_bad_image": "skip"}
    expected = two_epochs(small(few, **options))
    batches = two_epochs(small(few, **options, num_workers=num_workers))
    assert len(batches) == len(expected) == 8
    for batch, reference in zip(batches, expected, strict=True):
        assert all(
            torch.equal(batch[name], reference[name]) for name in ("image", "label", "index")
        )
        assert batch["bad"] == reference["bad"]
    assert sum(len(batch["bad"]) for batch in expected) == 4
    assert not torch.equal(expected[0]["image"], expected[4]["image"])  # the epochs differ


@control("random-numbers")
def test_control_without_a_seed_for_each_image_the_pixels_differ(few, monkeypatch):
    options = {"batch_size": 5, "val_fraction": 0, "on_bad_image": "skip"}
    expected = two_epochs(small(few, **options))
    for num_workers in (0, 1):
        data = small(few, **options, num_workers=num_workers)
        monkeypatch.setattr("finetune.data.dataset.set_random_seed", lambda transform, seed: None)
        batches = two_epochs(data)
        assert all(
            torch.equal(a["index"], b["index"]) for a, b in zip(batches, expected, strict=True)
        )
        assert not any(
            torch.equal(a["image"], b["image"]) for a, b in zip(batches, expected, strict=True)
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_of_all_devices_joined_are_the_global_batches(colours, world_size):
    expected = two_epochs(small(colours, batch_size=7))
    shares = [
        two_epochs(on_device(small(colours, batch_size=7), rank, world_size))
        for rank in range(world_size)
    ]
    for batch, parts in zip(expected, zip(*shares, strict=True), strict=True):
        for name in ("image", "label", "index"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_devices_joined_evaluate_every_image_once_in_order(colours, world_size):
    data = small(colours, batch_size=8)
    shares = [
        list(on_device(small(colours, batch_size=8), r, world_size).test_dataloader())
        for r in range(world_size)
    ]
    assert len({len(batches) for batches in shares}) == 1
    indices = torch.cat([batch["index"] for batches in shares for batch in batches])
    assert indices.tolist() == list(range(30))
    images = torch.cat([batch["image"] for batches in shares for batch in batches])
    transform, test = eval_transform(24), data.splits["test"]
    for i, path in enumerate(test.paths):
        expected = transform(image=cv2.imread(path, cv2.IMREAD_COLOR_RGB))["image"]
        np.testing.assert_array_equal(images[i].permute(1, 2, 0).numpy(), expected)
    assert (
        torch.cat([b["label"] for batches in shares for b in batches]).tolist()
        == test.targets.labels.tolist()
    )


def test_the_order_of_training_follows_the_seed_of_the_run(colours, monkeypatch):
    for seed in ("0", "3"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        indices = torch.cat(
            [batch["index"] for batch in small(colours, val_fraction=0).train_dataloader()]
        )
        np.testing.assert_array_equal(indices, train_order(60, int(seed), 0))


def test_training_continues_where_the_trainer_stands(colours):
    full = two_epochs(small(colours, batch_size=10))
    data = on_device(small(colours, batch_size=10), 0, 1)
    loop = data.trainer.fit_loop
    # As in a checkpoint after batch 2 of epoch 1: one epoch is done, another begun.
    loop.epoch_progress.current.started, loop.epoch_progress.current.processed = 2, 1
    loop.epoch_loop.batch_progress.current.processed = 2
    assert position(data.trainer) == (1, 2)
    for batch, expected in zip(data.train_dataloader(), full[6 + 2 :], strict=True):
        assert torch.equal(batch["image"], expected["image"])
    # At the end of an epoch the batches of that epoch still stand there.
    loop.epoch_progress.current.processed = 2
    assert position(data.trainer) == (2, 0)
    assert position(None) == (0, 0)


def test_a_damaged_image_is_named_or_skipped(few):
    with pytest.raises(
        DecodeError, match="03.png: cannot be decoded: .*; --data.on_bad_image skip skips"
    ):
        list(small(few, val_fraction=0).train_dataloader())
    (batch,) = small(few, val_fraction=0, on_bad_image="skip").train_dataloader()
    assert len(batch["label"]) == 14 and sorted(i for i, _ in batch["bad"]) == [3, 11]


def test_full_shared_memory_is_reported_before_workers_wait_for_it(colours, monkeypatch):
    monkeypatch.setattr(
        "finetune.data.loader.shutil.disk_usage", lambda path: SimpleNamespace(free=2**16)
    )
    with pytest.raises(ValueError, match="/dev/shm has 0 MB free.*--shm-size"):
        small(colours, num_workers=2, image_size=224).train_dataloader()
    assert small(colours, num_workers=0, image_size=224).train_dataloader()  # takes none


# Prediction


def test_prediction_reads_what_it_can_and_names_the_rest(some):
    # on_bad_image is for training
    data = ImageFolderData(predict="list.txt", image_size=24, num_workers=0)
    (batch,) = data.predict_dataloader()
    assert batch["index"].tolist() == [0, 2, 3] and torch.equal(
        batch["image"][0], batch["image"][2]
    )
    ((index, error),) = batch["bad"]
    assert index == 1 and "nowhere.png" in error


@pytest.mark.parametrize("split", ["test", "val", "predict"])
@pytest.mark.parametrize(("limit", "num"), [(1, 8), (9, 30), (0.5, 16), (0.99, 24), (1.0, 30)])
def test_a_limit_leaves_the_same_images_on_any_number_of_devices(colours, split, limit, num):
    """Images of all classes in 4 batches of 8; a prediction takes the first ones.

    Lightning's own limit takes the first batches of each rank, which have one class.
    """
    stage = RunningStage[{"test": "TESTING", "val": "VALIDATING", "predict": "PREDICTING"}[split]]
    # 30 or a few more
    given = {"val": {"val_fraction": 0.5}, "predict": {"predict": str(colours / "test")}}
    images = small(colours, batch_size=8, **given.get(split, {}))
    labels = images.splits[split].targets.labels
    full = len(labels)
    expected = list(range(full if num == 30 else num))
    if num < 30 and split != "predict":
        expected = [i * full // num for i in range(num)]
        assert set(labels[expected]) == {0, 1, 2} and max(np.diff(expected)) <= -(-full // num)
        assert len(set(labels[:8])) == 1  # the control
    for world_size in (1, 2, 3, 5):
        seen, steps = [], set()
        for rank in range(world_size):
            data = on_device(images, rank, world_size, **{f"limit_{split}_batches": limit})
            data.setup({"val": "validate"}.get(split, split))
            loader = getattr(data, f"{split}_dataloader")()
            left = _parse_num_batches(
                stage, len(loader), getattr(data.trainer, f"limit_{split}_batches")
            )
            steps.add(left)
            seen += [index for batch in list(loader)[:left] for index in batch["index"].tolist()]
        assert seen == expected
        assert len(steps) == 1


def test_what_is_overfitted_is_validated_on_all_classes(colours):
    data = on_device(small(colours, batch_size=9, val_fraction=0.5), 0, 1, overfit_batches=1)
    (batch,) = data.val_dataloader()
    assert set(batch["label"].tolist()) == {0, 1, 2}


def test_a_limit_below_one_batch_is_reported(colours):
    with pytest.raises(
        ValueError, match=r"trainer\.limit_test_batches 0\.2 is less than one batch of test"
    ):
        on_device(small(colours, batch_size=8), 0, 2, limit_test_batches=0.2).setup("test")


def test_setup_counts_the_limits_of_its_own_stage_alone(colours):
    """A split of another stage may still lose images, as test does after a fit."""
    limits = {"limit_val_batches": 0.5, "limit_test_batches": 0.5}
    data = on_device(small(colours, batch_size=8, val_fraction=0.5), 0, 2, **limits)
    data.setup("fit")
    num_batches = -(-len(data.splits["val"]) // 8)
    assert data.trainer.limit_val_batches == num_batches // 2
    assert data.trainer.limit_test_batches == 0.5


@pytest.mark.parametrize("world_size", [2, 3])
def test_overfitting_takes_the_images_of_one_device_on_several(colours, world_size):
    def taken(rank: int, devices: int) -> list[list[int]]:
        data = on_device(small(colours, batch_size=7), rank, devices, overfit_batches=2)
        return [batch["index"].tolist() for batch in list(data.train_dataloader())[:2]]

    shares = [taken(rank, world_size) for rank in range(world_size)]
    assert [[*chain(*parts)] for parts in zip(*shares, strict=True)] == taken(0, 1)


@pytest.mark.parametrize("overfit_batches", [0, 2])
def test_overfitting_takes_the_same_images_in_every_epoch(colours, overfit_batches):
    data = on_device(
        small(colours, batch_size=7, crop_and_flip=True), 0, 1, overfit_batches=overfit_batches
    )
    epochs = two_epochs(data)
    num = len(epochs) // 2
    first, second = (
        [batch["index"].tolist() for batch in part[:2]] for part in (epochs[:num], epochs[num:])
    )
    assert (first == second) == bool(overfit_batches)
    assert not torch.equal(epochs[0]["image"], epochs[num]["image"])  # augmented anew all the same


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_prediction_shares_are_the_parts_of_the_list(some, world_size):
    shares = []
    for rank in range(world_size):
        data = on_device(
            ImageFolderData(predict=".", image_size=24, num_workers=0, batch_size=2),
            rank,
            world_size,
        )
        shares.append(torch.cat([batch["index"] for batch in data.predict_dataloader()]).tolist())
    assert [index for part in shares for index in part] == [0, 1, 2, 3]


def test_prediction_without_images_says_which_flag(colours):
    with pytest.raises(ValueError, match="--data.predict"):
        small(colours).predict_dataloader()


@pytest.mark.slow
def test_validation_has_its_processes_before_training_fills_the_memory(colours):
    images = ImageFolderData(
        str(colours), image_size=24, num_workers=1, val_fraction=0.3, batch_size=4
    )
    num, loader = len(images.splits["val"]), images.loader("val")
    before = {child.pid for child in multiprocessing.active_children()}
    assert len(before) == 1
    with pytest.raises(queue.Empty):  # and they don't fill /dev/shm, which training's batches need
        loader._iterator._worker_result_queue.get(timeout=1)
    for _ in range(2):
        assert torch.cat([batch["index"] for batch in loader]).tolist() == list(range(num))
    assert {child.pid for child in multiprocessing.active_children()} == before
    loader._iterator._shutdown_workers()
