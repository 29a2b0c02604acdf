"""How long a fit can be such that it ends in time on this machine, from a trial of it."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pytorch_lightning.utilities.seed import isolate_rng

from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import num_within
from finetune.profiling.stopwatch import Costs
from finetune.profiling.time_trial import num_devices_of, starting, trial
from finetune.runs.deferred_checkpoints import is_worth_it, seconds_of_each
from finetune.system.machine import num_cores
from finetune.training.classifier import Classifier
from finetune.training.run_length import fewest_epochs, usual_epochs
from finetune.training.time_budget import Plan, plan

Make = Callable[[], tuple[ImageDataModule, Classifier]]

MOST_EPOCHS = 100
_TRIED = 0.05  # share of the time in which steps are timed, and seconds at most
_LONGEST_TRIAL = 5.0
# share of the time that the trial's steps may take, those that are not timed, too
_MOST_TRIED = 0.1
# How often each of several networks sees a picture, at least, and as a share of what is usual: up to there a single one
# gains more by learning longer. In docs/benchmarks.md, "How long" and "Several networks".
_FEWEST_OF_SEVERAL, _USUAL_OF_SEVERAL = 15, 0.8
# each answers for each picture, for good; what a further one adds is less than the one before
_MOST_MEMBERS = 5
# the power of the side that a step's seconds grow with: some of it does not depend on the pixels
_BY_SIDE = 1.6
_ENDING = 2.5  # seconds for what is written in the end, the report most of all


class Length(NamedTuple):
    """How long a fit can be at one size.

    Attributes:
        costs: Of its parts.
        plan: The longest that ends in time; None where that is not even a step.
        num_images: In the training split.
        num_batches: In an epoch that is not cut.
        others: Seconds that are not training or validation.
        cache_limit_gb: Of the data set; 0 where there is no time to see its pictures twice.
        again: Gives what to expect with other costs.
    """

    costs: Costs
    plan: Plan | None
    num_images: int
    num_batches: int
    others: float
    cache_limit_gb: float
    again: Callable[[Costs], "Length"]

    def is_enough(self) -> bool:
        """Return whether training sees half as many pictures as it does at least where nobody says how long."""
        return 2 * self.times_seen() >= fewest_epochs(self.num_images)

    def of_members(
        self, most: int | None = None, tried: int = 1, patience: float = 1.0
    ) -> tuple[int, "Length"]:
        """Return how many networks can each be trained so long that one more epoch is worth less than one more.

        Args:
            most: At most.
            tried: Of how many the costs are.
            patience: Share of that length which is enough.

        Returns:
            Their number, and what to expect.
        """
        enough = patience * max(
            _FEWEST_OF_SEVERAL, _USUAL_OF_SEVERAL * usual_epochs(self.num_images)
        )
        several = range(most or _MOST_MEMBERS, 1, -1)
        expected = (
            (num, self._times(num / tried, "checkpoint", "size", "copying")) for num in several
        )
        return next((found for found in expected if found[1].times_seen() >= enough), (1, self))

    def now(self) -> "Length":
        """Return the same with the time that is left by now."""
        return self.again(self.costs)

    def at(self, scale: float) -> "Length":
        """Return what to expect at another size."""
        return self._times(scale**_BY_SIDE)

    def times_seen(self) -> float:
        """Return how often each picture is trained on."""
        return self.plan.seen / self.num_images if self.plan else 0.0

    def _times(self, factor: float, *others: str) -> "Length":
        """Return what to expect where steps, evaluation and others take so many times as much."""
        costs = {
            name: getattr(self.costs, name) * factor for name in ("batch", "evaluate", *others)
        }
        return self.again(self.costs._replace(**costs))


class _Pictures(NamedTuple):
    """What a fit reads, and how."""

    sizes: Mapping[str, int]  # of each split
    batch_size: int  # over all devices
    num_workers: int  # that read, of each device
    cache_limit_gb: float
    is_decoded: bool  # anew for each validation


class Aim:
    """When a fit is to have ended.

    Args:
        seconds: After `began`.
        began: `time.monotonic` when the command began.
        config: Of `fit`, as parsed.
        alone: Seconds since `began` that the processes of other devices do not spend, too.
    """

    def __init__(self, seconds: float, began: float, config: Any, alone: float = 0.0) -> None:
        self.seconds = seconds
        self.began = began
        self.trainer = config.trainer
        self.is_tested, self.every_n_steps = config.test_after_fit, config.checkpoint_every_n_steps
        self.starting = starting(self.trainer, time.monotonic() - began - alone)

    def tried(self, make: Make) -> Length:
        """Return how long a fit can be, from a trial.

        Args:
            make: Gives the pictures and a network as the config has them.
        """
        with isolate_rng():  # the fit begins with random numbers of its own
            data, model = make()
            batch_size = data.batch_size
            timed = min(_LONGEST_TRIAL, _TRIED * self.seconds)
            costs = trial(
                model,
                data,
                self.trainer,
                timed,
                _MOST_TRIED * self.seconds,
                self.began + self.seconds,
            )
        sizes = {str(split): len(data.splits[split]) for split in data.splits}
        is_decoded = "val" in sizes and data.splits["val"].cached is None
        pictures = _Pictures(
            sizes, batch_size, int(data.num_workers), data.cache_limit_gb, is_decoded
        )
        return self._length(costs, pictures)

    def _length(self, costs: Costs, pictures: _Pictures) -> Length:
        sizes, batch_size = pictures.sizes, pictures.batch_size
        num_devices = num_devices_of(self.trainer["accelerator"], self.trainer["devices"])
        num_tested, num_validated = (
            num_within(self.trainer[f"limit_{split}_batches"], sizes.get(split, 0), batch_size)
            / num_devices
            for split in ("test", "val")
        )
        others = self.starting + costs.start + _ENDING + time.monotonic() - self.began
        # the first, and what waits in the end: a last, perhaps a best
        if is_worth_it(costs.checkpoint, costs.size):
            others += 3 * costs.checkpoint
        at_once = max(1, min(pictures.num_workers, num_cores() // num_devices))

        # of each of so many pictures of a device: a process reads whole batches
        def decode(num: float) -> float:
            return costs.decode / max(1, min(at_once, math.ceil(num * num_devices / batch_size)))

        evaluate = costs.evaluate + (decode(num_validated) if pictures.is_decoded else 0.0)
        others += num_tested * (costs.evaluate + decode(num_tested)) if self.is_tested else 0.0
        num = sizes["train"]
        batches = num_batches = math.ceil(num / batch_size)
        for _ in range(2):  # how often it validates, and writes, depends on how long an epoch is
            validations, inside, saves = self._occasions(batches)
            between = (
                costs.between
                + validations * num_validated * evaluate
                + (inside + saves) * costs.checkpoint
            )
            epoch = min(batches, num / batch_size) * costs.batch + between
            waiting = seconds_of_each(costs.checkpoint, costs.size, costs.copying, epoch)
            written = costs.checkpoint + costs.copying  # before a best inside the next epoch
            between += waiting + min(1.0, inside) * (max(waiting, written) - waiting)
            found = plan(
                self.seconds - others,
                batch=costs.batch,
                between=between,
                num_images=num,
                batch_size=batch_size,
                most=MOST_EPOCHS,
            )
            batches = (found and found.batches) or num_batches
        again = partial(self._length, pictures=pictures)
        return Length(costs, found, num, num_batches, others, pictures.cache_limit_gb, again)

    def _occasions(self, batches: int) -> tuple[float, float, float]:
        """Return how often an epoch of so many batches is validated, or a share of that; how often inside it; saves."""
        share, every = (
            self.trainer["val_check_interval"],
            self.trainer["check_val_every_n_epoch"] or 1,
        )
        each = batches if share is None else max(1, int(batches * share))
        inside = (batches // each - (batches % each == 0)) / every
        steps = batches / self.trainer["accumulate_grad_batches"]
        return (
            batches // each / every,
            inside,
            steps / self.every_n_steps if self.every_n_steps else 0.0,
        )
