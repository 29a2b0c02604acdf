"""Training pictures of one size after another: small ones first are faster, and the last epochs see all of the detail.

The size of an epoch is a function of the epoch and of the run's length, `trainer.max_epochs`, alone: the same on any
number of devices, in every worker, and in an epoch that a resumed run enters in the middle.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import albumentations as A

from finetune.system.messages import WrongUsage


class SizeSchedule:
    """Which of some sizes the pictures of an epoch have: each for an equal share of the epochs, in their order.

    Args:
        sizes: Sides in pixels.
        max_epochs: Of the whole run, resumed or not.
    """

    def __init__(self, sizes: Sequence[int], max_epochs: int) -> None:
        self.sizes, self.max_epochs = tuple(sizes), max_epochs

    def at(self, epoch: int) -> int:
        """Return the size of an epoch; after the last one it stays as it was."""
        return self.sizes[min(epoch * len(self.sizes) // self.max_epochs, len(self.sizes) - 1)]

    def told(self) -> str:
        """Return in words which epochs, counted from 1, have which size."""
        # The first epoch with epoch * len(sizes) // max_epochs == i, and in the end the one after the last.
        starts = [-(-i * self.max_epochs // len(self.sizes)) for i in range(len(self.sizes) + 1)]
        spans = [(first + 1, last) for first, last in pairwise(starts)]
        told = [
            f"epoch {last}" if first == last else f"epochs {first} to {last}"
            for first, last in spans
        ]
        return ", ".join(f"{size} in {span}" for size, span in zip(self.sizes, told, strict=True))


class ScheduledTransform:
    """What the pictures of an epoch go through.

    Args:
        transforms: By size.
        schedule: Which size an epoch has.
    """

    def __init__(self, transforms: Mapping[int, A.Compose], schedule: SizeSchedule) -> None:
        self.transforms, self.schedule = transforms, schedule

    def __call__(self, epoch: int) -> A.Compose:
        return self.transforms[self.schedule.at(epoch)]


def scheduled(
    transforms: Mapping[int, A.Compose],
    sizes: Sequence[int],
    max_epochs: int | None,
    is_try: bool = False,
) -> ScheduledTransform | None:
    """Return the transforms of the images by epoch, None without sizes. See `schedule_of`."""
    schedule = schedule_of(sizes, max_epochs, is_try)
    return None if schedule is None else ScheduledTransform(transforms, schedule)


def parse_sizes(given: Sequence[int] | str | None, image_size: int) -> tuple[int, ...]:
    """Return the sizes of a schedule, which is given as a list or text such as `96,128`; none for None.

    Args:
        given: The schedule.
        image_size: Where it has to end: what evaluation and a checkpoint go by must not be another by mistake.

    Raises:
        WrongUsage: These are no sizes, or they don't go with the others.
    """
    if given is None:
        return ()
    parts = (
        [part.strip() for part in given.split(",")]
        if isinstance(given, str)
        else [str(size) for size in given]
    )
    if not parts or not all(part.isdecimal() for part in parts):
        raise WrongUsage(
            f"image_size_schedule takes sizes in pixels, such as 96,128, not {given!r}"
        )
    sizes, text = tuple(map(int, parts)), ",".join(parts)
    if min(sizes) < 8:
        raise WrongUsage(f"sizes of image_size_schedule must be at least 8, got {text}")
    if sizes[-1] != image_size:
        raise WrongUsage(
            f"image_size_schedule {text} ends at {sizes[-1]}, and image_size is {image_size}: say --data.image_size "
            f"{sizes[-1]}; the size of evaluation alone is --data.eval_image_size"
        )
    return sizes


def schedule_of(
    sizes: Sequence[int], max_epochs: int | None, is_try: bool = False
) -> SizeSchedule | None:
    """Return the schedule of a run; None without sizes, and in a try, which is too short for them.

    Args:
        sizes: Sides in pixels.
        max_epochs: `trainer.max_epochs`.
        is_try: Whether `trainer.fast_dev_run` ends the run after a few batches.

    Raises:
        WrongUsage: The run has no number of epochs, or fewer than sizes.
    """
    if not sizes or is_try:
        return None
    if max_epochs is None or max_epochs < 0:
        raise WrongUsage(
            "image_size_schedule goes by the share of the epochs that are done: give trainer.max_epochs"
        )
    if max_epochs < len(sizes):
        epochs = f"trainer.max_epochs {max_epochs}"
        raise WrongUsage(
            f"image_size_schedule has {len(sizes)} sizes, {epochs} leaves some out: give fewer sizes"
        )
    return SizeSchedule(sizes, max_epochs)
