"""The length of a fit that ends in time on this machine, computed from the costs of a trial."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from pytorch_lightning.utilities.seed import isolate_rng

from finetune.data.batch_limits import num_within
from finetune.data.datamodule import ImageDataModule
from finetune.profiling.stopwatch import Costs
from finetune.profiling.time_trial import num_devices_of, startup_seconds, trial
from finetune.runs.deferred_checkpoints import is_worth_deferring, seconds_of_each
from finetune.settings.layers import replaced
from finetune.settings.schema import FitSettings
from finetune.system.machine import num_cores
from finetune.training.classifier import Classifier
from finetune.training.precision import automatic_precision
from finetune.training.run_length import fewest_epochs

Make = Callable[[], tuple[ImageDataModule, Classifier]]

MOST_EPOCHS = 100
_TIMED_SHARE = 0.05  # share of the fit's time in which the trial times steps
_LONGEST_TIMED = 5.0  # seconds in which the trial times steps, at most
# Share of the fit's time that all steps of the trial may take, untimed ones included.
_TRIAL_SHARE = 0.1
# The time of a step grows with this power of the image side. It is below 2 because some costs do not depend on pixels.
_SIDE_EXPONENT = 1.6
# From this many complete epochs on, at most a tenth of the time remains unused. Fewer epochs are shortened to fit.
_MIN_COMPLETE_EPOCHS = 9
_ENDING = 2.5  # seconds for what is written at the end, most of all the report


class TrainingLength(NamedTuple):
    """How long a fit trains.

    Attributes:
        epochs: Number of epochs.
        batches: Number of batches in each epoch; None for all.
        seen: Samples of all epochs.
        seconds: Expected duration of all epochs.
    """

    epochs: int
    batches: int | None
    seen: int
    seconds: float


def longest_training(
    seconds: float,
    *,
    batch: float,
    between: float,
    num_images: int,
    batch_size: int,
    most: int,
) -> TrainingLength | None:
    """Return the longest fit that takes at most `seconds`; None if there is no time for a single batch.

    If there is time for few epochs only, epochs are shortened. Each then has the first batches of its own random order,
    so that no image is skipped for long.

    Args:
        seconds: Time for training and validation.
        batch: Seconds of a full batch. A smaller batch takes proportionally less.
        between: Seconds between epochs, for validation and a checkpoint.
        num_images: Images in the training split.
        batch_size: The global batch size.
        most: The largest number of epochs.
    """
    num_batches = math.ceil(num_images / batch_size)
    full_batches = max(1.0, num_images / batch_size)  # a smaller last batch counts as a part of one

    def affordable_batches(epochs: int) -> int:
        """Return the number of batches of each epoch that there is time for."""
        left = seconds / epochs - between
        if left >= full_batches * batch:
            return num_batches
        return min(num_batches - 1, math.floor(left / batch))

    complete = seconds / (full_batches * batch + between)
    num_epochs = math.floor(complete) if complete >= _MIN_COMPLETE_EPOCHS else math.ceil(complete)
    epochs = min(most, num_epochs)
    batches = affordable_batches(epochs) if epochs > 0 else 0
    # validation and checkpoints of more epochs would take all of the time
    while epochs > 1 and batches < 1:
        epochs -= 1
        batches = affordable_batches(epochs)
    if batches < 1:
        return None
    seen = epochs * min(num_images, batches * batch_size)
    each = min(full_batches, batches) * batch + between
    return TrainingLength(epochs, batches if batches < num_batches else None, seen, epochs * each)


class Length(NamedTuple):
    """How long a fit can be with one network and image size.

    Attributes:
        costs: Seconds that its parts take.
        training: The longest training that ends in time; None if there is no time for a single step.
        num_images: Number of training images.
        num_batches: Number of batches in a full epoch.
        others: Seconds that are neither training nor validation.
        cache_limit_gb: That of the data; 0 if there is no time to read the images twice.
        recompute: Returns the length with other costs.
    """

    costs: Costs
    training: TrainingLength | None
    num_images: int
    num_batches: int
    others: float
    cache_limit_gb: float
    recompute: Callable[[Costs], "Length"]

    def is_enough(self) -> bool:
        """Return whether the fit has at least half of the fewest epochs of a fit of default length."""
        return 2 * self.times_seen() >= fewest_epochs(self.num_images)

    def at_scale(self, scale: float) -> "Length":
        """Return the expected length with images whose side is `scale` times as long."""
        factor = scale**_SIDE_EXPONENT
        return self.recompute(
            self.costs._replace(
                batch=factor * self.costs.batch, evaluate=factor * self.costs.evaluate
            )
        )

    def times_seen(self) -> float:
        """Return how often training sees each image."""
        return self.training.seen / self.num_images if self.training else 0.0


class _Reading(NamedTuple):
    """The images that a fit reads, and how it reads them."""

    sizes: Mapping[str, int]  # number of images of each split
    batch_size: int  # over all devices
    num_workers: int  # of each device
    cache_limit_gb: float
    is_val_decoded: bool  # whether each validation decodes its images again


class _Events(NamedTuple):
    """Mean numbers in an epoch."""

    validations: float
    inside: float  # validations before the end of the epoch
    checkpoints: float  # by --checkpoint_every_n_steps


class Deadline:
    """The time at which a fit must have ended.

    Attributes:
        precision: The precision of the fit; set by `measure_length` if its settings have none.

    Args:
        seconds: Seconds from `began` to the deadline.
        began: `time.monotonic` when the command began.
        settings: Those of the fit.
        alone: Seconds since `began` that only this process spent. The processes of other devices do not spend them.
    """

    def __init__(
        self, seconds: float, began: float, settings: FitSettings, alone: float = 0.0
    ) -> None:
        self.seconds = seconds
        self.began = began
        self.trainer = settings.trainer
        self.is_tested = settings.test_after_fit
        self.every_n_steps = settings.checkpoint_every_n_steps
        self.precision: str | None = settings.trainer.precision
        self.startup = startup_seconds(self.trainer, time.monotonic() - began - alone)

    def measure_length(self, make: Make) -> Length:
        """Run a trial, and return how long the fit can be.

        Args:
            make: Returns the data and a network according to the config.
        """
        with isolate_rng():  # the trial must not change the random numbers of the fit
            data, model = make()
            if self.precision is None:
                self.precision = automatic_precision(
                    self.trainer.accelerator, None, is_resumed=False, network=model.network
                )
            batch_size = data.batch_size
            timed = min(_LONGEST_TIMED, _TIMED_SHARE * self.seconds)
            costs = trial(
                model,
                data,
                replaced(self.trainer, {"precision": self.precision}),
                timed,
                _TRIAL_SHARE * self.seconds,
                self.began + self.seconds,
            )
        sizes = {str(split): len(data.splits[split]) for split in data.splits}
        reading = _Reading(
            sizes=sizes,
            batch_size=batch_size,
            num_workers=int(data.num_workers),
            cache_limit_gb=data.cache_limit_gb,
            is_val_decoded="val" in sizes and data.splits["val"].cached is None,
        )
        return self._length(costs, reading)

    def _length(self, costs: Costs, reading: _Reading) -> Length:
        """Return how long a fit with these costs can be, in the time that is left now."""
        sizes = reading.sizes
        batch_size = reading.batch_size
        # Costs are those of one device, which evaluates its share of the images.
        num_devices = num_devices_of(self.trainer.accelerator, self.trainer.devices)
        num_tested, num_validated = (
            num_within(limit, sizes.get(split, 0), batch_size) / num_devices
            for split, limit in (
                ("test", self.trainer.limit_test_batches),
                ("val", self.trainer.limit_val_batches),
            )
        )
        others = self.startup + costs.start + _ENDING + time.monotonic() - self.began
        # Three checkpoints: the first, and the deferred last.ckpt and best.ckpt at the end.
        if is_worth_deferring(costs.checkpoint, costs.size):
            others += 3 * costs.checkpoint
        num_decoders = max(1, min(reading.num_workers, num_cores() // num_devices))

        def decode(num: float) -> float:
            """Return the seconds per image if a device decodes `num` images. A worker reads whole batches."""
            num_read = math.ceil(num * num_devices / batch_size)  # batches of all devices
            return costs.decode / max(1, min(num_decoders, num_read))

        evaluate = costs.evaluate + (decode(num_validated) if reading.is_val_decoded else 0.0)
        if self.is_tested:
            others += num_tested * (costs.evaluate + decode(num_tested))
        num = sizes["train"]
        batches = num_batches = math.ceil(num / batch_size)
        # Two rounds: the number of validations and checkpoints depends on the length of an epoch, and vice versa.
        for _ in range(2):
            steps = min(batches, num / batch_size) * costs.batch
            longest = longest_training(
                self.seconds - others,
                batch=costs.batch,
                between=self._seconds_between(costs, batches, steps, num_validated * evaluate),
                num_images=num,
                batch_size=batch_size,
                most=MOST_EPOCHS,
            )
            batches = num_batches
            if longest is not None and longest.batches is not None:
                batches = longest.batches
        return Length(
            costs=costs,
            training=longest,
            num_images=num,
            num_batches=num_batches,
            others=others,
            cache_limit_gb=reading.cache_limit_gb,
            recompute=partial(self._length, reading=reading),
        )

    def _seconds_between(
        self, costs: Costs, batches: int, steps: float, validation: float
    ) -> float:
        """Return the seconds per epoch that are not spent on steps: for validations, checkpoints and its end.

        Args:
            costs: The costs of the fit.
            batches: Number of batches in an epoch.
            steps: Seconds of their steps.
            validation: Seconds of a validation.
        """
        events = self._events_per_epoch(batches)
        inside = (events.inside + events.checkpoints) * costs.checkpoint
        between = costs.between + events.validations * validation + inside
        waiting = seconds_of_each(costs.checkpoint, costs.size, costs.copying, steps + between)
        # A best.ckpt inside an epoch makes the deferred last.ckpt be written before it.
        written = costs.checkpoint + costs.copying
        return between + waiting + min(1.0, events.inside) * (max(waiting, written) - waiting)

    def _events_per_epoch(self, batches: int) -> _Events:
        """Return the mean numbers of validations and checkpoints in an epoch of this many batches."""
        share = self.trainer.val_check_interval
        every = self.trainer.check_val_every_n_epoch or 1
        each = batches if share is None else max(1, int(batches * share))
        num_inside = batches // each
        if batches % each == 0:
            num_inside -= 1  # the last validation comes at the end of the epoch
        inside = num_inside / every
        steps = batches / self.trainer.accumulate_grad_batches
        return _Events(
            validations=batches // each / every,
            inside=inside,
            checkpoints=steps / self.every_n_steps if self.every_n_steps else 0.0,
        )
