"""augmented.webp: training images as prepared for evaluation, and as augmented in the first epochs."""

from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import SHEET, draw_indices, run_seed
from finetune.system.files import replacing

_ROWS = 6
_EPOCHS = 5
_SIDE = 96
_GAP = 4


def write_augmented(data: ImageDataModule, target: Path) -> None:
    """Write a sheet with one training image per row: as in evaluation, then as in each of the first epochs."""
    num = len(data.splits["train"])
    training = data.image_dataset("train", train=True)
    evaluation = data.image_dataset("train")
    step = _SIDE + _GAP
    sheet = np.full((min(_ROWS, num) * step - _GAP, (1 + _EPOCHS) * step - _GAP, 3), 255, np.uint8)
    for row, index in enumerate(sorted(draw_indices(num, _ROWS, SHEET, run_seed()))):
        items = [evaluation[int(index)], *(training[epoch, int(index)] for epoch in range(_EPOCHS))]
        for column, item in enumerate(items):
            if item["image"] is not None:
                y = row * step
                x = column * step
                shrunk = cv2.resize(item["image"], (_SIDE, _SIDE), interpolation=cv2.INTER_AREA)
                sheet[y : y + _SIDE, x : x + _SIDE] = shrunk
    with replacing(target) as file:
        Image.fromarray(sheet).save(file, format="WebP", quality=80)
