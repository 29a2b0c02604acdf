"""Lists of paths, single images and batches: pixels, labels, memory layout, unreadable images."""

from pathlib import Path

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from promise import control, promise

from finetune.data.dataset import Collate, ImageDataset
from finetune.data.decode import DecodeError
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex
from finetune.data.transforms import eval_transform, train_transform


def gradient(height: int = 40, width: int = 60) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 4, y * 6, 255 - x * 2 - y], axis=-1).astype(np.uint8)


def images(transform: A.Compose, num: int = 3, seed: int = 0) -> ImageDataset:
    return ImageDataset(
        lambda i: np.roll(gradient(), i, axis=1), ClassIndex(np.arange(num) % 2, 2), transform, seed
    )


@promise("random-numbers")
def test_training_pixels_depend_on_seed_epoch_and_index_alone():
    data, other = images(train_transform(32)), images(train_transform(32))
    expected = {key: data[key]["image"] for key in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    # another order, repeated, from another transform object
    for key in [(1, 1), (0, 0), (1, 0), (0, 1), (0, 0)]:
        other[2, 2]
        np.testing.assert_array_equal(other[key]["image"], expected[key])
    assert not np.array_equal(expected[0, 0], expected[1, 0])
    assert not np.array_equal(images(train_transform(32), seed=1)[0, 0]["image"], expected[0, 0])


def test_images_that_are_alike_are_not_transformed_alike():
    data = ImageDataset(
        lambda i: gradient(), ClassIndex(np.zeros(50, int), 1), train_transform(32), 0
    )
    first = data[0, 0]["image"]
    assert not any(np.array_equal(data[0, i]["image"], first) for i in range(1, 50))


@control("random-numbers")
def test_control_without_the_seed_pixels_depend_on_what_came_before(monkeypatch):
    data = images(train_transform(32))
    monkeypatch.setattr("finetune.data.dataset.set_random_seed", lambda transform, seed: None)
    assert not np.array_equal(data[0, 0]["image"], data[0, 0]["image"])


def test_an_evaluation_index_gives_image_label_and_index():
    item = images(eval_transform(32))[1]
    np.testing.assert_array_equal(
        item.pop("image"), eval_transform(32)(image=np.roll(gradient(), 1, axis=1))["image"]
    )
    assert item == {"index": 1, "label": 1, "error": ""}
    assert len(images(eval_transform(32))) == 3


@pytest.mark.parametrize("key", [1, (4, 1)])
def test_an_image_that_cannot_be_decoded_ends_the_run_or_is_left_out(tmp_path, key):
    good, bad = str(tmp_path / "good.png"), str(tmp_path / "bad.png")
    cv2.imwrite(good, gradient())
    Path(bad).write_bytes(b"\x89PNG but no more")
    samples = Samples(PathList([good, bad]), ClassIndex(np.array([0, 1]), 2))
    with pytest.raises(DecodeError, match="bad.png"):
        ImageDataset(samples.read, samples.targets, eval_transform(32))[key]
    item = ImageDataset(samples.read, samples.targets, eval_transform(32), on_bad_image="skip")[key]
    assert (
        item["image"] is None
        and item["index"] == 1
        and item["label"] == 1
        and "bad.png" in item["error"]
    )
    batch = Collate(32)([ImageDataset(samples.read, samples.targets, eval_transform(32))[0], item])
    assert batch["index"].tolist() == [0] and batch["bad"] == [(1, item["error"])]


def test_other_errors_than_a_bad_image_are_not_skipped():
    def read(index: int) -> np.ndarray:
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        ImageDataset(
            read, ClassIndex(np.zeros(1, np.int64), 1), eval_transform(32), on_bad_image="skip"
        )[0]


def test_a_batch_holds_the_pixels_in_channels_last_order():
    items = [images(eval_transform(32))[i] for i in range(3)]
    batch = Collate(32)(items)
    image = batch["image"]
    assert image.shape == (3, 3, 32, 32) and image.dtype == torch.uint8
    assert image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()
    for i, item in enumerate(items):
        for channel in range(3):
            np.testing.assert_array_equal(image[i, channel].numpy(), item["image"][:, :, channel])
    assert (
        batch["label"].tolist() == [0, 1, 0]
        and batch["index"].tolist() == [0, 1, 2]
        and batch["bad"] == []
    )
    assert batch["label"].dtype == batch["index"].dtype == torch.int64


def test_a_batch_of_nothing_has_the_shapes_that_a_step_needs():
    bad = {"index": 7, "label": 0, "image": None, "error": "torn"}
    for items, errors in ([], []), ([bad], [(7, "torn")]):
        batch = Collate(32)(items)
        assert batch["image"].shape == (0, 3, 32, 32) and batch["image"].dtype == torch.uint8
        assert (
            batch["label"].shape == batch["index"].shape == (0,)
            and batch["label"].dtype == torch.int64
        )
        assert batch["bad"] == errors


def test_an_image_of_another_size_is_no_batch():
    with pytest.raises(ValueError, match="broadcast"):
        Collate(32)([{"index": 0, "label": 0, "image": gradient(), "error": ""}])
