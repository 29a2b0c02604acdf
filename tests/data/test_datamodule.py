"""Fixed views of training pictures; all else of the loaders is tested in test_datamodules.py, on data modules."""

import multiprocessing
import queue

import numpy as np
import pytest
import torch

from finetune import ImageFolderData


def data(root, **options) -> ImageFolderData:
    options = {"image_size": 24, "batch_size": 16, "num_workers": 0, "val_fraction": 0, **options}
    return ImageFolderData(str(root), **options)


def pixels(pictures: ImageFolderData, epoch: int) -> np.ndarray:
    shown = pictures.pictures("train", train=True)
    return np.stack([shown[epoch, index]["image"] for index in range(8)])


def test_views_take_turns_by_epoch_and_differ(colours):
    two = data(colours, num_views=2)
    assert np.array_equal(pixels(two, 0), pixels(two, 2)) and np.array_equal(pixels(two, 1), pixels(two, 5))
    assert not np.array_equal(pixels(two, 0), pixels(two, 1))
    anew = data(colours)
    assert np.array_equal(pixels(anew, 1), pixels(two, 1)) and not np.array_equal(pixels(anew, 0), pixels(anew, 2))


def test_without_random_transforms_there_is_one_view(colours):
    assert data(colours, crop_and_flip=False).num_views == 1
    jitter = [{"class_path": "albumentations.ColorJitter"}]
    assert data(colours, crop_and_flip=False, augmentations=jitter).num_views is None
    with pytest.raises(ValueError, match="num_views must be at least 1, got 0"):
        data(colours, num_views=0)


def test_all_views_of_train_in_order_are_what_features_are_computed_of(colours):
    two = data(colours, num_views=2)
    num = len(two.splits["train"].labels)
    assert two.num_rows("train") == 2 * num and two.num_rows("test") == len(two.splits["test"].labels)
    assert [two.key("train", row) for row in (0, num - 1, num)] == [(0, 0), (0, num - 1), (1, 0)]
    assert two.key("test", 3) == 3
    batches = list(two.loader("train"))
    index = torch.cat([batch["index"] for batch in batches])
    assert index.tolist() == [*range(num), *range(num)]
    images = torch.cat([batch["image"] for batch in batches]).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(images[:8], pixels(two, 0)) and np.array_equal(images[num : num + 8], pixels(two, 1))


def test_validation_has_its_processes_before_training_fills_the_memory(colours):
    pictures = data(colours, num_workers=1, val_fraction=0.3, batch_size=4)
    num, loader = len(pictures.splits["val"].labels), pictures.loader("val")
    before = {child.pid for child in multiprocessing.active_children()}
    assert len(before) == 1
    with pytest.raises(queue.Empty):  # and they don't fill /dev/shm, which training's batches need
        loader._iterator._worker_result_queue.get(timeout=1)
    for _ in range(2):
        assert torch.cat([batch["index"] for batch in loader]).tolist() == list(range(num))
    assert {child.pid for child in multiprocessing.active_children()} == before
    loader._iterator._shutdown_workers()
