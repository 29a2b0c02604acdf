"""The sheet of augmented images has the pixels of training, and is the same for the same seed."""

import numpy as np
from PIL import Image
from small_fits import data

from finetune.data.dataset import ImageDataset
from finetune.training import augmented_sheet
from finetune.training.augmented_sheet import write_augmented


def test_rows_are_images_and_columns_epochs(colours, tmp_path, monkeypatch):
    asked = []
    get = ImageDataset.__getitem__

    def remembered(self, key):
        asked.append(key)
        return get(self, key)

    monkeypatch.setattr(ImageDataset, "__getitem__", remembered)
    images = data(colours)
    write_augmented(images, tmp_path / "a.webp")
    indices = asked[::6]
    assert len(set(indices)) == 6 and asked == [
        key
        for i in indices
        for key in (i, *((epoch, i) for epoch in range(augmented_sheet._EPOCHS)))
    ]
    with Image.open(tmp_path / "a.webp") as opened:
        sheet = np.asarray(opened)
    assert sheet.shape == (6 * 100 - 4, 6 * 100 - 4, 3)
    # Noise is averaged out: the mean colour of each is that of its class, as evaluation prepares it.
    for row, index in enumerate(indices):
        expected = get(images.image_dataset("train"), index)["image"].mean(axis=(0, 1))
        np.testing.assert_allclose(
            sheet[row * 100 : row * 100 + 96, :96].mean(axis=(0, 1)), expected, atol=8
        )
    write_augmented(images, tmp_path / "b.webp")
    assert (tmp_path / "a.webp").read_bytes() == (tmp_path / "b.webp").read_bytes()


def test_mixed_images_are_shown_mixed(colours, tmp_path):
    for name, shown in (("mixed", data(colours, cutmix=1.0)), ("plain", data(colours))):
        write_augmented(shown, tmp_path / f"{name}.webp")
    mixed, alone = (
        np.asarray(Image.open(tmp_path / f"{name}.webp")).astype(int) for name in ("mixed", "plain")
    )
    off = np.abs(mixed - alone).mean(axis=2)
    # As evaluation prepares them they are what they were, but for what WebP makes of the neighbours; the noise of
    # another image, in a box of half the area on average, is some 15 levels off.
    assert off[:, :96].mean() < 4 and off[:, 100:].mean() > 8


def test_very_few_images_make_a_small_sheet(colours, tmp_path):
    images = data(colours)
    images.splits["train"] = images.splits["train"].take(np.arange(2))
    write_augmented(images, tmp_path / "a.webp")
    with Image.open(tmp_path / "a.webp") as sheet:
        assert sheet.height == 2 * 100 - 4
