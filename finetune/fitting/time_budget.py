"""The length of a fit that ends in time (`--minutes`): what its parts cost here, and the longest fit by these costs."""

import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from finetune.data.datamodule import ImageDataModule
from finetune.data.decode import DecodeError
from finetune.data.loader import Devices, automatic_workers, end_workers
from finetune.data.samplers import ESTIMATE, draw_indices
from finetune.distributed.signals import install_stop_at_once
from finetune.settings.schema import TrainerSettings
from finetune.system.machine import num_cores
from finetune.system.messages import only_errors
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit
from finetune.training.precision import allow_tf32

# Loggers whose messages the fit will log again.
_LOGGED_AGAIN = ("finetune.training", "finetune.features.linear_probe")
_WARM_UP = 3  # untimed steps, in which libraries choose their kernels and workers read ahead
_FEWEST = 4  # timed steps, at least
_TIMED_SHARE = 0.05  # share of the fit's time in which steps are timed
_LONGEST_TIMED = 5.0  # seconds in which steps are timed, at most
_STEPS_SHARE = 0.1  # share of the fit's time after which slow steps end the measurement
_VALIDATED = 2  # batches; the first one may wait for workers
_NUM_DECODED = 24  # images
# Share of the time that is left in which the images may be decoded for the cache.
_CACHE_SHARE = 1 / 3
_BETWEEN = 0.2  # seconds between epochs, if no epoch has ended
# The time of a step grows with this power of the image side. It is below 2 because some costs do not depend on pixels.
_SIDE_EXPONENT = 1.6
# From this many complete epochs on, at most a tenth of the time remains unused. Fewer epochs are shortened to fit.
_MIN_COMPLETE_EPOCHS = 9


class Costs(NamedTuple):
    """Seconds that the parts of a fit take, by all of its devices together.

    Attributes:
        start: Until the first steps have ended. This includes a head that is fitted, and compiling.
        train: To train on an image, with a part of the time between epochs if epochs are short.
        evaluate: To validate an image.
        decode: To decode an image that is not in the cache.
        between: Between two epochs, besides the validation, if it is not a part of `train`.
    """

    start: float
    train: float
    evaluate: float
    decode: float
    between: float

    def at_scale(self, scale: float) -> "Costs":
        """Return the expected costs with images whose side is `scale` times as long."""
        factor = scale**_SIDE_EXPONENT
        return self._replace(train=factor * self.train, evaluate=factor * self.evaluate)


class Work(NamedTuple):
    """The images of a fit.

    Attributes:
        train: Number of training images.
        batch_size: Images in a batch, over all devices.
        validated: Number of images that are validated in an epoch, on average.
        evaluated: Number of images that are evaluated after training: the test images, and those of the familiarity.
    """

    train: int
    batch_size: int
    validated: float
    evaluated: int


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
) -> TrainingLength:
    """Return the longest fit that takes at most `seconds`, or one of a single batch, if there is no time for any.

    If there is time for few epochs only, epochs are shortened. Each then has the first batches of its own random order,
    so that no image is skipped for long.

    Args:
        seconds: Time for training and validation.
        batch: Seconds of a full batch. A smaller batch takes proportionally less.
        between: Seconds between epochs, with validation.
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
    epochs = max(1, min(most, num_epochs))
    batches = affordable_batches(epochs)
    # validations of more epochs would take all of the time
    while epochs > 1 and batches < 1:
        epochs -= 1
        batches = affordable_batches(epochs)
    batches = max(1, batches)
    seen = epochs * min(num_images, batches * batch_size)
    each = min(full_batches, batches) * batch + between
    return TrainingLength(epochs, batches if batches < num_batches else None, seen, epochs * each)


def measure(
    model: Classifier,
    data: ImageDataModule,
    trainer: TrainerSettings,
    num_devices: int,
    seconds: float,
    left: float,
) -> Costs:
    """Begin a fit on one device, and return what its parts cost. It trains for some steps, and writes nothing.

    Args:
        model: The model. Its weights change.
        data: Its images. The image cache is filled. `cache_limit_gb` becomes 0 if there is no time for that.
        trainer: The settings of a Trainer for the first device of the fit, with the precision.
        num_devices: Devices of the fit. On a CPU they share the cores, which one process uses alone.
        seconds: Seconds that the fit has in all.
        left: Seconds of them that are left.
    """
    meter = _Meter(min(_LONGEST_TIMED, _TIMED_SHARE * seconds), _STEPS_SHARE * seconds)
    with only_errors(*_LOGGED_AGAIN):
        fit = pl.Trainer(
            accelerator=trainer.accelerator,
            devices=trainer.devices,
            precision=trainer.precision,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            deterministic=trainer.deterministic,
            max_epochs=10**6,
            limit_val_batches=_VALIDATED if "val" in data.splits else 0,
            callbacks=[meter],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
        if fit.strategy.root_device.type == "cpu":
            num_devices = 1
        else:
            allow_tf32()
        model.scheduler = None  # it takes no time, but may need the length of the fit
        check_fit(fit, model, data)
        data.trainer = fit
        decode = _settle_cache(data, left)
        _use_share_of_batch(data, fit, num_devices)
        meter.start()
        try:
            fit.fit(model, datamodule=data)
        finally:
            end_workers()
    costs = meter.costs(decode)
    return costs._replace(train=costs.train / num_devices, evaluate=costs.evaluate / num_devices)


def _settle_cache(data: ImageDataModule, left: float) -> float:
    """Fill the image cache of the fit if there is time, and return the seconds to decode an image."""
    samples = replace(data.splits["train"], cached=None)
    # Each time different images: the system has files that were read before in memory.
    chosen = draw_indices(len(samples), _NUM_DECODED, ESTIMATE, time.time_ns()).tolist()
    began = time.perf_counter()
    for i in chosen:
        with suppress(DecodeError):
            samples.read(i)
    each = (time.perf_counter() - began) / len(chosen) / num_cores()
    data.use_cache(reads=1)
    num = sum(len(data.splits[split]) for split in ("train", "val") if split in data.splits)
    if data.splits["train"].cached is None and num * each > _CACHE_SHARE * left:
        data.cache_limit_gb = 0.0
    else:
        data.use_cache(reads=2)
    return each


def _use_share_of_batch(data: ImageDataModule, fit: pl.Trainer, num_devices: int) -> None:
    """Let the data have the batches and the workers of one of several devices."""
    if num_devices == 1:
        return
    # batch norm cannot train on a batch of one image
    data.batch_size = min(data.batch_size, max(2, math.ceil(data.batch_size / num_devices)))
    fit.limit_train_batches = max(1, len(data.splits["train"]) // data.batch_size)
    if data.num_workers == "auto":
        data.num_workers = automatic_workers(Devices("cuda", num_devices))


class _Step(NamedTuple):
    """A training step that has ended.

    Attributes:
        end: When, in seconds.
        epoch: The epoch that it belongs to.
        trained: Images of all steps until then.
        validated: Images of all validations until then.
    """

    end: float
    epoch: int
    trained: int
    validated: int


class _Meter(pl.Callback):
    """Times the steps of a fit and its validation, and stops it.

    Args:
        seconds: Seconds in which steps are timed.
        most: Seconds after which slow steps end the measurement.
    """

    def __init__(self, seconds: float, most: float) -> None:
        self.seconds = seconds
        self.most = most
        self.steps: list[_Step] = []
        self.evaluate: float | None = None  # seconds of an image
        self._trained = 0
        self._validated = 0
        self._batches: list[tuple[float, int]] = []  # end and images of each batch of a validation

    def start(self) -> None:
        self.began = time.perf_counter()

    def on_train_start(self, *_: Any) -> None:
        # Stop at once at a signal: there is nothing to save.
        install_stop_at_once()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = _now(pl_module.device)
        self._trained += max(1, len(batch["index"]))
        self.steps.append(_Step(now, trainer.current_epoch, self._trained, self._validated))
        num = len(self.steps)
        if self._has_timed:
            is_enough = now - self.steps[_WARM_UP].end >= self.seconds
        else:
            is_enough = num >= 3 and now - self.began >= self.most
        if is_enough:
            trainer.should_stop = True  # after a validation

    @property
    def _has_timed(self) -> bool:
        """Whether there are enough steps after the warm-up."""
        return len(self.steps) > _WARM_UP + _FEWEST

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._batches = [(_now(pl_module.device), 0)]

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._batches.append((_now(pl_module.device), len(batch["index"])))

    def on_validation_end(self, *_: Any) -> None:
        # the first of several batches may have waited for workers
        timed = self._batches[1:] if len(self._batches) > 2 else self._batches
        self.evaluate = (timed[-1][0] - timed[0][0]) / max(1, sum(num for _, num in timed[1:]))
        self._validated += sum(num for _, num in self._batches)

    def costs(self, decode: float) -> Costs:
        """Return the costs by what was timed, with those of decoding an image."""
        first = self.steps[_WARM_UP if self._has_timed else 1]
        last = self.steps[-1]
        validation = (last.validated - first.validated) * (self.evaluate or 0.0)
        seconds = max(0.0, last.end - first.end - validation)
        train = seconds / (last.trained - first.trained)
        return Costs(
            start=first.end - self.began,
            train=train,
            evaluate=train if self.evaluate is None else self.evaluate,
            decode=decode,
            # steps of several epochs include what is between them
            between=_BETWEEN if first.epoch == last.epoch else 0.0,
        )


def _now(device: torch.device) -> float:
    """Return the time when a GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
