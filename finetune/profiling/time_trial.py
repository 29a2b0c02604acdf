"""A trial of a fit: some of its steps on its own images, to measure what the parts of the fit cost here."""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator

from finetune.data.datamodule import ImageDataModule
from finetune.data.decode import DecodeError
from finetune.data.loader import Devices, automatic_workers, end_workers
from finetune.data.samplers import ESTIMATE, draw_indices
from finetune.distributed.launch import count_devices
from finetune.profiling import step_timing
from finetune.profiling.recorder import MeasurementDone
from finetune.profiling.stopwatch import Costs, Stopwatch
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.settings.schema import TrainerSettings
from finetune.system.machine import num_cores
from finetune.system.messages import only_errors
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit
from finetune.training.precision import allow_tf32

_NUM_DECODED = 24  # images
# Loggers whose messages the fit will log again. What trial and fit share is computed in the trial, and only it logs it.
_LOGGED_AGAIN = ("finetune.training", "finetune.features.linear_probe")
# Seconds. If decoding all images for the cache takes less, the cache is always worthwhile.
_SOON = 1.0


def trial(
    model: Classifier,
    data: ImageDataModule,
    trainer: TrainerSettings,
    seconds: float,
    most: float = math.inf,
    end: float = math.inf,
) -> Costs:
    """Run a trial, and return the seconds that the parts of a fit take on one of its devices.

    Args:
        model: The model. The trial changes its weights.
        data: The images. The trial uses the batch size of one device. It sets `cache_limit_gb` to 0 if, after all
            images were decoded for the cache, there would be no time to train on each twice.
        trainer: The settings of the Trainer of the fit.
        seconds: Seconds in which steps are timed.
        most: Seconds after which slow steps end the trial early; see `Stopwatch`.
        end: Deadline of the fit, as a time of `time.monotonic`.
    """
    num_devices = num_devices_of(trainer.accelerator, trainer.devices)
    if _is_cuda(trainer.accelerator):
        allow_tf32()  # as the fit will
    with (
        _folder(trainer.default_root_dir) as folder,
        _per_device_threads(num_devices),
        only_errors(*_LOGGED_AGAIN),
        _unchanged_gpu_order(),
    ):
        stopwatch = Stopwatch(seconds, most, folder)
        fit = _trial_trainer(trainer, stopwatch, folder)
        # It takes no time, but may need the length of the fit or a validation.
        model.scheduler = None
        check_fit(fit, model, data)
        # The fit fits the head again, so that counts. Otherwise the hook only fills caches, which the fit reuses.
        if model.head_init != "probe":
            model.on_fit_start = stopwatch.paused(model.on_fit_start)  # type: ignore[method-assign]
        _pause_while_reading(stopwatch, model, data, num_devices, end)
        # At least two images: batch norm cannot train on a batch of one.
        data.batch_size = min(data.batch_size, max(2, math.ceil(data.batch_size / num_devices)))
        if data.num_workers == "auto":
            devices = Devices(fit.strategy.root_device.type, num_devices)
            data.num_workers = automatic_workers(devices)
        num = len(data.splits["train"])
        fit.limit_train_batches = max(1, num // data.batch_size) if num_devices > 1 else 1.0
        try:
            fit.fit(model, datamodule=data)
        except MeasurementDone:
            pass
        finally:
            end_workers()
    assert stopwatch.costs is not None, "a fit of a million epochs ends in no other way"
    return stopwatch.costs


def _trial_trainer(trainer: TrainerSettings, stopwatch: Stopwatch, folder: str) -> pl.Trainer:
    """Return the Trainer of a trial: the arithmetic of the fit on its first device, without end, writing nothing.

    Args:
        trainer: As for `trial`.
        stopwatch: The callback that ends the trial.
        folder: The temporary folder of the trial.
    """
    return pl.Trainer(
        accelerator=trainer.accelerator,
        devices=_first(trainer.accelerator, trainer.devices),
        precision=trainer.precision,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        deterministic=trainer.deterministic,
        # With more than one epoch the image cache is built, as in the fit.
        max_epochs=10**6,
        limit_val_batches=0,
        callbacks=[stopwatch],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        plugins=[AtomicCheckpointIO()],
    )


def _pause_while_reading(
    stopwatch: Stopwatch, model: Classifier, data: ImageDataModule, num_devices: int, end: float
) -> None:
    """Pause the stopwatch while the trial lists images and fills the image cache, which the fit finds complete.

    Without time to train on each image twice after all were decoded, the cache is switched off.

    Args:
        stopwatch: The stopwatch.
        model: The model of the trial.
        data: Its images; two methods of this object are replaced.
        num_devices: Number of devices of the fit.
        end: As for `trial`.
    """
    load = data.train_dataloader
    setup = data.setup

    def set_up_without_cache(stage: str) -> None:
        limit = data.cache_limit_gb
        data.cache_limit_gb = 0.0
        setup(stage)
        data.cache_limit_gb = limit

    def decide_about_cache_and_load() -> Any:
        decoding = decode_seconds(data)
        if decoding > _SOON:
            num_steps = (end - time.monotonic() - decoding) / _step_seconds(model, data)
            num_seen = num_steps * data.batch_size * num_devices
            if num_seen < 2 * len(data.splits["train"]):
                data.cache_limit_gb = 0.0
        data.use_cache()
        return load()

    # A head that is fitted first reads all images. Otherwise the decision about the cache comes after `setup`, because
    # only then a step can be timed.
    is_head_fitted = model.head_init == "probe" or model.is_solved
    data.setup = stopwatch.paused(setup if is_head_fitted else set_up_without_cache)  # type: ignore[method-assign]
    data.train_dataloader = stopwatch.paused(decide_about_cache_and_load)  # type: ignore[method-assign]


def decode_seconds(data: ImageDataModule) -> float:
    """Estimate the seconds that all cores take to decode train and val once; 0 if the training images are cached."""
    data.use_cache(reads=1)
    dataset = data.image_dataset("train")
    if data.splits["train"].cached is not None:
        return 0.0
    # Each trial uses different images: the system has the files of an earlier trial in memory.
    some = draw_indices(len(dataset), _NUM_DECODED, ESTIMATE, time.time_ns())
    began = time.perf_counter()
    for i in some.tolist():
        with suppress(DecodeError):
            dataset.read(i)
    each = (time.perf_counter() - began) / len(some)
    num = sum(len(data.splits[split]) for split in ("train", "val") if split in data.splits)
    return each * num / num_cores()


def _step_seconds(model: Classifier, data: ImageDataModule) -> float:
    """Estimate the seconds that the network takes to train on a batch."""
    images = torch.zeros(
        data.batch_size, 3, data.image_size, data.image_size, dtype=torch.uint8, device=model.device
    )

    def step() -> None:
        with model.trainer.precision_plugin.forward_context():
            model(images).float().sum().backward()
        model.zero_grad()

    return step_timing.timed(step, model.device, 1)[0]


def startup_seconds(trainer: TrainerSettings, seconds: float) -> float:
    """Estimate the seconds until the processes of the fit's other devices have started; 0 if there are none.

    Args:
        trainer: The settings of the Trainer of the fit.
        seconds: Seconds that this process took to start. The others take as long.
    """
    return 0.0 if num_devices_of(trainer.accelerator, trainer.devices) == 1 else seconds


def _folder(root: Any) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder on the disk of the fit: in its root folder, or in the nearest parent that exists."""
    path = Path(root).absolute()
    place = next(place for place in (path, *path.parents) if place.is_dir())
    try:
        return tempfile.TemporaryDirectory(prefix=".finetune-trial-", dir=place)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(
            f"nothing can be written in {place}: {reason}; --out sets another folder for runs"
        ) from error


def num_devices_of(accelerator: Any, devices: Any) -> int:
    """Return the number of this machine's devices that the fit will use."""
    return (
        count_devices(devices) or (torch.cuda.device_count() if _is_cuda(accelerator) else 0) or 1
    )


def _first(accelerator: Any, devices: Any) -> list[int] | int:
    """Return the `devices` of a trainer for the first device of the fit, which need not be the machine's first."""
    names = devices
    if isinstance(devices, str) and "," in devices:
        names = [name for name in devices.split(",") if name]
    return [int(names[0])] if isinstance(names, list) and names and _is_cuda(accelerator) else 1


def _is_cuda(accelerator: Any) -> bool:
    """Return whether `trainer.accelerator` means CUDA devices on this machine."""
    wants = accelerator in ("auto", "gpu", "cuda") or isinstance(accelerator, CUDAAccelerator)
    return wants and torch.cuda.is_available()


def _per_device_threads(num_devices: int) -> AbstractContextManager[None]:
    """Limit torch's threads to one device's share of the cores, as Lightning does when it starts several processes."""
    if num_devices == 1:
        return nullcontext()
    return step_timing.torch_threads(max(1, num_cores() // num_devices))


@contextmanager
def _unchanged_gpu_order() -> Iterator[None]:
    """Restore CUDA_DEVICE_ORDER afterwards.

    Lightning sets it after CUDA has started in this process. Processes that start later would number GPUs differently.
    """
    before = os.environ.get("CUDA_DEVICE_ORDER")
    try:
        yield
    finally:
        os.environ.pop("CUDA_DEVICE_ORDER", None)
        if before is not None:
            os.environ["CUDA_DEVICE_ORDER"] = before
