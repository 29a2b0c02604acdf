"""The default number of epochs of a fit: many epochs for few images, few for many."""

import math
from types import MappingProxyType
from typing import Any

from finetune.data.batch_limits import batches_within
from finetune.settings.schema import TrainerSettings

_MIN_SAMPLES = 8_000  # samples of all epochs, at least: 250 steps of 32
_ENOUGH = 15  # epochs, or fewer if they would have more than _MAX_SAMPLES
_MAX_SAMPLES = 150_000  # samples of all epochs
_MIN_EPOCHS = 5
_MAX_EPOCHS = 50


def fewest_epochs(num_images: int) -> int:
    """Return the smallest recommended number of epochs.

    A small data set needs as many steps as a larger one. Otherwise the learning rate falls to 0 before the head is
    trained. In BiT (arXiv:1912.11370, section 3.3) all sets of less than 20,000 images have the same number of steps.

    Args:
        num_images: Training images of an epoch.
    """
    return min(_MAX_EPOCHS, max(_MIN_EPOCHS, math.ceil(_MIN_SAMPLES / max(1, num_images))))


def usual_epochs(num_images: int) -> int:
    """Return the default number of epochs, without a time limit.

    In our benchmarks (docs/decisions.md), sets of 188 to 1,400 images mostly gained much
    from 5 to 15 epochs, and little or nothing from more. For larger sets the number of samples is limited, to save
    time.

    Args:
        num_images: Training images of an epoch.
    """
    return max(fewest_epochs(num_images), min(_ENOUGH, _MAX_SAMPLES // max(1, num_images)))


# A fit with a solved head runs its loop once: nothing trains, but the hooks at its end run.
SOLVED_HEAD = MappingProxyType(
    {
        "minutes": None,
        "trainer.max_epochs": 1,
        "trainer.max_steps": -1,
        "trainer.limit_train_batches": 1,
        "trainer.val_check_interval": None,
        "trainer.check_val_every_n_epoch": 1,
        "trainer.accumulate_grad_batches": 1,
        "trainer.gradient_clip_val": None,
    }
)


def settle_length(
    limits: TrainerSettings, num_images: int, batch_size: int
) -> tuple[dict[str, Any], str]:
    """Return the default number of epochs if the user sets no limit, by its full name, and a note about it.

    Args:
        limits: The settings of the Trainer.
        num_images: Images in the training split.
        batch_size: The global batch size.
    """
    if limits.max_epochs is not None or limits.max_steps != -1:
        return {}, ""
    batches = batches_within(limits.limit_train_batches, math.ceil(num_images / batch_size))
    seen = min(num_images, batches * batch_size)
    epochs = usual_epochs(seen)
    steps = epochs * math.ceil(batches / limits.accumulate_grad_batches)
    note = f"{epochs} epochs, {steps:,} steps, as is usual for {seen:,} training images; --epochs sets another number"
    return {"trainer.max_epochs": epochs}, note
