"""Small folders of images in three easy classes, and the options of a fit on them that takes a second."""

from pathlib import Path

import cv2
import numpy as np

NAMES = ("blue", "green", "red")  # of the classes
# Options of a fit that takes a second.
QUICK = [
    *("--data.image_size", "32", "--data.batch_size", "16", "--data.num_workers", "0"),
    *("--model.weights", "null", "--model.backbone", "mobilenet_v3_small"),
    *("--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true"),  # the same on every machine
    # a constant rate, so a run of two epochs equals one of one epoch that is continued
    *("--model.scheduler", "null"),
    *("--report", "false"),
]
# The same of a smaller network, of which a fit takes half as long and an export a fifth.
QUICKEST = [*QUICK, "--data.image_size", "28", "--model.backbone", "small_cnn"]


def draw_colours(root: Path, **num_images: int) -> Path:
    """Write `split=n` noisy 48x56 images for each of blue, green and red."""
    rng = np.random.default_rng(0)
    for split, num in num_images.items():
        for channel, name in enumerate(NAMES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(num):
                image = rng.integers(0, 120, (48, 56, 3)).astype(np.uint8)
                image[:, :, channel] += 60  # BGR, as OpenCV has it
                cv2.imwrite(str(folder / f"{i:02d}.png"), image)
    return root


def draw_patients(root: Path, num_patients: int = 24, num_copies: int = 5) -> Path:
    """Write near copies of an image for each patient, in `CLASS/PATIENT`. The class is independent of the image."""
    rng = np.random.default_rng(0)
    for patient in range(num_patients):
        folder = root / ("sick" if patient % 2 else "well") / f"p{patient}"
        folder.mkdir(parents=True)
        coarse = rng.integers(20, 236, (4, 4, 3)).astype(np.uint8)
        image = cv2.resize(coarse, (48, 48), interpolation=cv2.INTER_NEAREST)
        for i in range(num_copies):
            noise = rng.integers(-2, 3, image.shape)
            cv2.imwrite(str(folder / f"{i}.png"), (image + noise).astype(np.uint8))
    return root
