"""The same images in the same batches for any number of workers and devices; images that cannot be decoded."""

import cv2
import numpy as np
import pytest
import torch
from data_files import small
from promise import promise

from finetune import ImageFolderData
from finetune.data.datamodule import ImageDataModule, position
from finetune.data.dataset import Collate, ImageDataset
from finetune.data.decode import DecodeError
from finetune.data.samplers import TrainBatches, augmentation_seed, train_order
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex
from finetune.data.transforms import eval_transform, train_transform


def gradient(height: int = 40, width: int = 60) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 4, y * 6, 255 - x * 2 - y], axis=-1).astype(np.uint8)


def images(transform, num: int = 3, seed: int = 0) -> ImageDataset:
    targets = ClassIndex(np.arange(num) % 2, 2)
    return ImageDataset(lambda i: np.roll(gradient(), i, axis=1), targets, transform, seed)


def forget_the_seed_of_an_image(monkeypatch):
    monkeypatch.setattr("finetune.data.dataset.set_random_seed", lambda transform, seed: None)


def give_all_images_one_seed(monkeypatch):
    def of_the_epoch(seed: int, epoch: int, index: int) -> int:
        return augmentation_seed(seed, epoch, 0)

    monkeypatch.setattr("finetune.data.dataset.augmentation_seed", of_the_epoch)


@promise("random-numbers", controls=[forget_the_seed_of_an_image, give_all_images_one_seed])
def test_training_pixels_depend_on_seed_epoch_and_index_alone():
    data, other = images(train_transform(32)), images(train_transform(32))
    expected = {key: data[key]["image"] for key in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    # another order, repeated, from another transform object
    for key in [(1, 1), (0, 0), (1, 0), (0, 1), (0, 0)]:
        other[2, 2]
        np.testing.assert_array_equal(other[key]["image"], expected[key])
    assert not np.array_equal(expected[0, 0], expected[1, 0])
    assert not np.array_equal(images(train_transform(32), seed=1)[0, 0]["image"], expected[0, 0])
    # images that are alike are not transformed alike
    alike = images(train_transform(32), 50)
    alike.read = lambda i: gradient()
    assert not any(np.array_equal(alike[0, i]["image"], expected[0, 0]) for i in range(1, 50))


def test_on_bad_image_ends_the_run_or_skips_the_image(tmp_path):
    good, bad = str(tmp_path / "good.png"), tmp_path / "bad.png"
    cv2.imwrite(good, gradient())
    bad.write_bytes(b"\x89PNG but no more")
    samples = Samples(PathList([good, str(bad)]), ClassIndex(np.array([0, 1]), 2))
    data = ImageDataset(samples.read, samples.targets, eval_transform(32))
    with pytest.raises(DecodeError, match=r"bad.png: .*--data.on_bad_image skip"):
        data[1]
    data.on_bad_image = "skip"
    item = data[1]
    assert item["image"] is None and item["index"] == item["label"] == 1
    batch = Collate(32)([data[0], item])
    assert batch["index"].tolist() == [0] and batch["bad"] == [(1, item["error"])]


# Batches


def two_epochs(data: ImageDataModule) -> list[dict]:
    loader, batches = data.train_dataloader(), []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        batches += list(loader)
    return batches


def equal(batch: dict, other: dict, *names: str) -> bool:
    names = names or tuple(name for name in other if name != "bad")
    return batch.keys() == other.keys() and all(torch.equal(batch[n], other[n]) for n in names)


@promise("random-numbers", controls=[forget_the_seed_of_an_image])
# A real warning for a person who asks for it, and here the purpose: more workers than cores.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("num_workers", "mixup"), [(1, 0.0), (3, 0.4)])
def test_the_number_of_workers_changes_no_pixel(few, num_workers, mixup):
    options = {"batch_size": 5, "val_fraction": 0, "on_bad_image": "skip"}
    options |= {"mixup": mixup, "cutmix": mixup}
    expected = two_epochs(small(few, **options))
    batches = two_epochs(small(few, **options, num_workers=num_workers))
    assert len(batches) == len(expected) == 8
    for batch, reference in zip(batches, expected, strict=True):
        assert equal(batch, reference) and batch["bad"] == reference["bad"]
        assert ("share" in batch) == (mixup > 0)
    assert sum(len(batch["bad"]) for batch in expected) == 4
    assert not torch.equal(expected[0]["image"], expected[4]["image"])  # the epochs differ


def test_a_probe_of_training_images_sees_none_that_are_mixed(colours):
    mixed = small(colours, mixup=0.4)
    assert mixed.settings.mixup == 0.4 and "share" not in next(iter(mixed.loader("train")))


def give_each_rank_an_order_of_its_own(monkeypatch):
    init = TrainBatches.__init__

    def of_the_rank(batches, **arguments):
        init(batches, **arguments)
        batches.seed += batches.rank

    monkeypatch.setattr(TrainBatches, "__init__", of_the_rank)


@promise("random-numbers", controls=[give_each_rank_an_order_of_its_own])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_training_batches_of_all_devices_joined_are_those_of_one(colours, on_device, world_size):
    expected = two_epochs(small(colours, batch_size=7))
    devices = [on_device(small(colours, batch_size=7), r, world_size) for r in range(world_size)]
    shares = [two_epochs(device) for device in devices]
    for batch, parts in zip(expected, zip(*shares, strict=True), strict=True):
        for name in ("image", "label", "index"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])


@promise("each-image-once")
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_devices_joined_evaluate_every_image_once_in_order(colours, on_device, world_size):
    test = small(colours).splits["test"]
    devices = [on_device(small(colours, batch_size=8), r, world_size) for r in range(world_size)]
    shares = [list(device.test_dataloader()) for device in devices]
    assert len({len(batches) for batches in shares}) == 1
    joined = {
        name: torch.cat([batch[name] for batches in shares for batch in batches])
        for name in ("image", "label", "index")
    }
    assert joined["index"].tolist() == list(range(30))
    assert joined["label"].tolist() == test.targets.labels.tolist()
    for image, path in zip(joined["image"], test.paths, strict=True):
        expected = eval_transform(24)(image=cv2.imread(path, cv2.IMREAD_COLOR_RGB))["image"]
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), expected)


def forget_the_labels(monkeypatch):
    monkeypatch.setattr(ClassIndex, "fingerprint", lambda targets: b"")


@promise("equal-ranks", controls=[forget_the_labels])
def test_ranks_that_found_different_labels_all_raise(colours, tmp_path, monkeypatch, on_device):
    """As with a file of corrections that grows while the ranks start."""
    file = tmp_path / "corrections.csv"
    file.write_text("path,was,now\ntrain/blue/00.png,blue,red\n")
    same = [small(colours, corrections=str(file)) for _ in range(2)]
    file.write_text(file.read_text() + "test/red/01.png,red,blue\n")
    same.append(small(colours, corrections=str(file)))  # test images are not corrected
    file.write_text(file.read_text() + "train/red/01.png,red,blue\n")
    grown = small(colours, corrections=str(file))
    digests: list[str] = []

    def gather(of_ranks, mine):
        digests.append(mine)
        of_ranks[:] = digests[-2:]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for rank, data in enumerate(same):
        on_device(data, rank % 2, 2).setup("fit")
    with pytest.raises(ValueError, match="different images or labels in .*colours"):
        on_device(grown, 1, 2).setup("fit")


def test_the_order_of_training_follows_the_seed_of_the_run(colours, monkeypatch):
    for seed in ("0", "3"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        batches = small(colours, val_fraction=0).train_dataloader()
        indices = torch.cat([batch["index"] for batch in batches])
        np.testing.assert_array_equal(indices, train_order(60, int(seed), 0))


def forget_the_batch(monkeypatch):
    monkeypatch.setattr(
        "finetune.data.datamodule.position", lambda trainer: (position(trainer)[0], 0)
    )


@promise("resume", controls=[forget_the_batch])
def test_training_continues_where_the_trainer_stands(colours, on_device):
    full = two_epochs(small(colours, batch_size=10))
    data = on_device(small(colours, batch_size=10))
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


# Limits of the Trainer


@pytest.mark.parametrize("split", ["test", "val", "predict"])
@pytest.mark.parametrize(("limit", "num"), [(1, 8), (0.5, 16)])
def test_a_limit_of_batches_takes_the_same_images_on_any_number_of_devices(
    colours, on_device, split, limit, num
):
    """Images of all classes in 4 batches of 8; a prediction takes the first ones.

    Lightning's own limit takes the first batches of each rank, which have one class.
    """
    given = {"val": {"val_fraction": 0.5}, "predict": {"predict": str(colours / "test")}}
    data = small(colours, batch_size=8, **given.get(split, {}))
    labels = data.splits[split].targets.labels
    full = len(labels)
    expected = list(range(num))
    if split != "predict":
        expected = [i * full // num for i in range(num)]
        assert set(labels[expected]) == {0, 1, 2} and max(np.diff(expected)) <= -(-full // num)
        assert len(set(labels[:8])) == 1  # the control
    for world_size in (1, 3):
        seen, steps = [], set()
        for rank in range(world_size):
            on_device(data, rank, world_size, **{f"limit_{split}_batches": limit})
            data.setup({"val": "validate"}.get(split, split))
            left = getattr(data.trainer, f"limit_{split}_batches")
            batches = list(getattr(data, f"{split}_dataloader")())[:left]
            steps.add(len(batches))
            seen += [index for batch in batches for index in batch["index"].tolist()]
        assert seen == expected and len(steps) == 1


# Prediction


@pytest.mark.parametrize("world_size", [1, 3])
def test_prediction_reads_what_it_can_and_names_the_rest(colours, tmp_path, on_device, world_size):
    images = sorted(str(path) for path in (colours / "test/red").iterdir())[:2]
    lines = [images[0], str(tmp_path / "nowhere.png"), images[1], images[0]]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    batches = []
    for rank in range(world_size):
        data = ImageFolderData(
            predict=str(tmp_path / "list.txt"), image_size=24, num_workers=0, batch_size=2
        )
        batches += list(on_device(data, rank, world_size).predict_dataloader())
    assert [index for batch in batches for index in batch["index"].tolist()] == [0, 2, 3]
    pixels = torch.cat([batch["image"] for batch in batches])
    assert torch.equal(pixels[0], pixels[2])
    # on_bad_image is for training
    ((index, error),) = [bad for batch in batches for bad in batch["bad"]]
    assert index == 1 and "nowhere.png" in error
