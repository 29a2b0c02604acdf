"""Progressive resizing: small training images first, which is faster, and the full size in the last epochs.

The size depends only on the epoch and on `trainer.max_epochs`. It is the same on any number of devices, in every
worker, and after resuming in the middle of an epoch.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import albumentations as A

from finetune.models.checkpoint_values import MIN_PIXELS
from finetune.system.messages import WrongUsage


class SizeSchedule:
    """The image size of each epoch: each size for an equal share of the epochs, in order.

    Args:
        sizes: Sides in pixels.
        max_epochs: Epochs of the complete run, including those before a resume.
    """

    def __init__(self, sizes: Sequence[int], max_epochs: int) -> None:
        self.sizes = tuple(sizes)
        self.max_epochs = max_epochs

    def at(self, epoch: int) -> int:
        """Return the size of an epoch. After the last epoch the size stays the same."""
        return self.sizes[min(epoch * len(self.sizes) // self.max_epochs, len(self.sizes) - 1)]

    def describe(self) -> str:
        """Return a text with the epochs of each size, counted from 1."""
        # First epoch with epoch * len(sizes) // max_epochs == i, and finally the one after the last epoch.
        starts = [-(-i * self.max_epochs // len(self.sizes)) for i in range(len(self.sizes) + 1)]
        spans = [(first + 1, last) for first, last in pairwise(starts)]
        texts = [
            f"epoch {last}" if first == last else f"epochs {first} to {last}"
            for first, last in spans
        ]
        return ", ".join(f"{size} in {text}" for size, text in zip(self.sizes, texts, strict=True))


class ScheduledTransform:
    """The training transform of each epoch.

    Args:
        transforms: Transform of each size.
        schedule: Size of each epoch.
    """

    def __init__(self, transforms: Mapping[int, A.Compose], schedule: SizeSchedule) -> None:
        self.transforms = transforms
        self.schedule = schedule

    def __call__(self, epoch: int) -> A.Compose:
        return self.transforms[self.schedule.at(epoch)]


def build_scheduled_transform(
    transforms: Mapping[int, A.Compose],
    sizes: Sequence[int],
    max_epochs: int | None,
    is_fast_dev_run: bool = False,
) -> ScheduledTransform | None:
    """Return the transforms of the images by epoch, None without sizes. See `build_schedule`."""
    schedule = build_schedule(sizes, max_epochs, is_fast_dev_run)
    return None if schedule is None else ScheduledTransform(transforms, schedule)


def parse_sizes(value: Sequence[int] | str | None, image_size: int) -> tuple[int, ...]:
    """Return the sizes of a schedule; () for None.

    Args:
        value: A list, or text such as `96,128`.
        image_size: The last size must equal it, because evaluation and checkpoints use it.

    Raises:
        WrongUsage: The values are not sizes, or the last size is not `image_size`.
    """
    if value is None:
        return ()
    parts = (
        [part.strip() for part in value.split(",")]
        if isinstance(value, str)
        else [str(size) for size in value]
    )
    if not parts or not all(part.isdecimal() for part in parts):
        raise WrongUsage(
            f"image_size_schedule takes sizes in pixels, such as 96,128, not {value!r}"
        )
    sizes = tuple(map(int, parts))
    text = ",".join(parts)
    if min(sizes) < MIN_PIXELS:
        raise WrongUsage(f"sizes of image_size_schedule must be at least {MIN_PIXELS}, got {text}")
    if sizes[-1] != image_size:
        raise WrongUsage(
            f"image_size_schedule {text} ends at {sizes[-1]}, and image_size is {image_size}: set --data.image_size "
            f"{sizes[-1]}; the size of evaluation alone is --data.eval_image_size"
        )
    return sizes


def build_schedule(
    sizes: Sequence[int], max_epochs: int | None, is_fast_dev_run: bool = False
) -> SizeSchedule | None:
    """Return the schedule of a run; None without sizes, and for a fast_dev_run, which is too short for them.

    Args:
        sizes: Sides in pixels.
        max_epochs: `trainer.max_epochs`.
        is_fast_dev_run: Whether `trainer.fast_dev_run` ends the run after a few batches.

    Raises:
        WrongUsage: `max_epochs` is unlimited, or less than the number of sizes.
    """
    if not sizes or is_fast_dev_run:
        return None
    if max_epochs is None or max_epochs < 0:
        raise WrongUsage(
            "image_size_schedule depends on the share of the epochs that are done: set trainer.max_epochs"
        )
    if max_epochs < len(sizes):
        epochs = f"trainer.max_epochs {max_epochs}"
        raise WrongUsage(
            f"image_size_schedule has {len(sizes)} sizes, more than {epochs}: use fewer sizes"
        )
    return SizeSchedule(sizes, max_epochs)
