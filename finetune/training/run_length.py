"""How long a fit is where nobody says: many epochs for few pictures, few for many."""

import math
from functools import partial
from typing import Any

from finetune.data.samplers import batches_within
from finetune.training.run_limits import steps_in

_SEEN = 8_000  # pictures at least, each counted as often as it is seen: 250 steps of 32
_ENOUGH = 15  # epochs
_MOST_SEEN = 150_000  # pictures, for the sake of that many epochs
_FEWEST, _MOST = 5, 50  # epochs


def fewest_epochs(num_images: int) -> int:
    """Return how often to see each of so many training pictures, at least.

    A small set needs as many steps as a larger one, or the head has hardly begun to learn when the rate falls to 0, as
    in BiT (arXiv:1912.11370, section 3.3), where all sets of less than 20,000 pictures have the same number.

    Args:
        num_images: Of an epoch.
    """
    return min(_MOST, max(_FEWEST, math.ceil(_SEEN / max(1, num_images))))


def usual_epochs(num_images: int) -> int:
    """Return how often to see each of so many training pictures where there is no hurry.

    Of ours, see "How long" in docs/benchmarks.md, sets of 188 to 1,400 pictures mostly gained much from 5 to 15 epochs,
    and little or nothing beyond. Larger ones have what there is time for.

    Args:
        num_images: Of an epoch.
    """
    return max(fewest_epochs(num_images), min(_ENOUGH, _MOST_SEEN // max(1, num_images)))


# The settings of a Trainer that say how long it trains and how a step is made, and what a solved head leaves of them.
_OF_A_SOLVED_HEAD = {
    "max_epochs": 1,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "limit_train_batches": 1,
    "overfit_batches": 0.0,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
}


def settle_solved_head(options: Any) -> None:
    """Let a fit whose head is solved exactly go once through the loop, in which nothing trains: for what ends it.

    Args:
        options: Of `fit`, as parsed; changed in place.
    """
    options.minutes = None
    for name, value in _OF_A_SOLVED_HEAD.items():
        options.trainer[name] = value


def settle_length(limits: Any, num_images: int, batch_size: int) -> str:
    """Give a fit its usual epochs if no limit was given, and return in words what was chosen.

    Args:
        limits: The Trainer's settings; `max_epochs` is set where neither it nor `max_steps` was, to what `min_epochs`
            or `min_steps` ask for where that is more.
        num_images: In the training split.
        batch_size: Of a batch over all devices.
    """
    if limits["max_epochs"] is not None or limits["max_steps"] != -1 or limits["fast_dev_run"]:
        return ""
    limit = limits["overfit_batches"] or limits["limit_train_batches"]
    batches = batches_within(limit, math.ceil(num_images / batch_size))
    seen = min(num_images, batches * batch_size)
    steps_of = partial(
        steps_in, limits["accumulate_grad_batches"], limits.get("callbacks"), batches
    )
    epochs = max(usual_epochs(seen), limits["min_epochs"] or 0)
    steps = steps_of(range(epochs))
    # once, where all epochs have as many
    while batches and (missing := (limits["min_steps"] or 0) - steps) > 0:
        epochs += math.ceil(missing / steps_of(range(epochs, epochs + 1)))
        steps = steps_of(range(epochs))
    limits["max_epochs"] = epochs
    return f"{epochs} epochs, {steps:,} steps, as is usual for {seen:,} training pictures; --epochs sets another number"
