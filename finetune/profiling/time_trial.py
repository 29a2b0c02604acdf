"""What a fit costs on this machine: some of its steps, on its own pictures, timed and given up."""

import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from finetune.profiling.recorder import Measured
from finetune.profiling.stopwatch import Costs, Stopwatch
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.system.machine import num_cores
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit
from finetune.training.precision import allow_tf32

_NUM_DECODED = 24  # pictures
_SOON = 1.0  # seconds in which all pictures are decoded without another thought


def trial(
    model: Classifier,
    data: ImageDataModule,
    trainer: Any,
    seconds: float,
    most: float = math.inf,
    end: float = math.inf,
) -> Costs:
    """Return what the parts of a fit take on one of its devices.

    Args:
        model: Used up by it: its weights are others afterwards.
        data: The pictures; of its batch the trial takes a device's share. Its `cache_limit_gb` is 0 afterwards where
            there is no time to see them twice once all of them are decoded to be kept.
        trainer: `accelerator`, `precision`, `devices`, `accumulate_grad_batches`, `benchmark`, `deterministic` and
            `default_root_dir` of the fit.
        seconds: For how long steps are timed.
        most: How long the trial's steps may take; then the third is the last, and the only one that is timed.
        end: When the fit is to have ended, by `time.monotonic`.
    """
    num_devices = num_devices_of(trainer["accelerator"], trainer["devices"])
    if _is_cuda(trainer["accelerator"]):
        allow_tf32()  # as the fit will
    with (
        _folder(trainer["default_root_dir"]) as folder,
        _cores(num_devices),
        _untold(),
        _order_of_gpus(),
    ):
        stopwatch = Stopwatch(seconds, most, folder)
        fit = pl.Trainer(
            accelerator=trainer["accelerator"],
            devices=_first(trainer["accelerator"], trainer["devices"]),
            precision=trainer["precision"],
            accumulate_grad_batches=trainer["accumulate_grad_batches"],
            benchmark=trainer["benchmark"],
            deterministic=trainer["deterministic"],
            # so many that what is kept of the pictures is made, as in a fit of several
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
        model.scheduler = None  # it takes no time, and may want an end, or a validation
        check_fit(fit, model, data)
        # a head is fitted again, what is kept of pictures is there then
        if model.head_init != "probe":
            model.on_fit_start = stopwatch.paused(model.on_fit_start)  # type: ignore[method-assign]
        load = data.train_dataloader

        def train_dataloader() -> Any:
            if (seconds := decoding(data)) > _SOON:
                seen = (
                    (end - time.monotonic() - seconds)
                    / _step(model, data)
                    * data.batch_size
                    * num_devices
                )
                data.cache_limit_gb *= seen >= 2 * len(data.splits["train"])
            return load()

        data.train_dataloader = stopwatch.paused(train_dataloader)  # type: ignore[method-assign]
        # A last batch of one picture, as a device's share alone may leave, is none for batch norm.
        data.batch_size = min(data.batch_size, max(2, math.ceil(data.batch_size / num_devices)))
        if data.num_workers == "auto":
            devices = Devices(fit.strategy.root_device.type, num_devices)
            data.num_workers = automatic_workers(devices)
        num = len(data.splits["train"])
        fit.limit_train_batches = max(1, num // data.batch_size) if num_devices > 1 else 1.0
        try:
            fit.fit(model, datamodule=data)
        except Measured:
            pass
        finally:
            end_workers()
    assert stopwatch.costs is not None, "a fit of a million epochs ends in no other way"
    return stopwatch.costs


def decoding(data: ImageDataModule) -> float:
    """Return about how many seconds all cores take to decode train and val once; 0 where that was done before."""
    data.use_cache(reads=1)
    pictures = data.pictures("train")
    if data.splits["train"].cached is not None:
        return 0.0
    # Others each time: those of a trial before are in memory.
    some, began = (
        draw_indices(len(pictures), _NUM_DECODED, ESTIMATE, time.time_ns()),
        time.perf_counter(),
    )
    for i in some.tolist():
        with suppress(DecodeError):
            pictures.read(i)
    each = (time.perf_counter() - began) / len(some)
    return (
        each
        * sum(len(data.splits[split]) for split in ("train", "val") if split in data.splits)
        / num_cores()
    )


def _step(model: Classifier, data: ImageDataModule) -> float:
    """Return about how many seconds the network takes for a batch of training."""
    images = torch.zeros(
        data.batch_size, 3, data.image_size, data.image_size, dtype=torch.uint8, device=model.device
    )

    def step() -> None:
        with model.trainer.precision_plugin.forward_context():
            model(images).float().sum().backward()
        model.zero_grad()

    return step_timing.timed(step, model.device, 1)[0]


def starting(trainer: Any, seconds: float) -> float:
    """Return the seconds until the processes of a fit's other devices are there.

    Args:
        trainer: `accelerator` and `devices` of the fit.
        seconds: What this process took from its beginning until now: they do the same.
    """
    return 0.0 if num_devices_of(trainer["accelerator"], trainer["devices"]) == 1 else seconds


def _folder(root: Any) -> tempfile.TemporaryDirectory[str]:
    """Return a folder where the fit's will be, or as near above it as is there: on the disk that it will write to."""
    path = Path(root).absolute()
    place = next(place for place in (path, *path.parents) if place.is_dir())
    try:
        return tempfile.TemporaryDirectory(prefix=".finetune-trial-", dir=place)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(
            f"nothing can be written in {place}: {reason}; --out names another folder for runs"
        ) from error


@contextmanager
def _untold() -> Iterator[None]:
    """Keep to ourselves what the fit will say again; what is computed once for both, the trial alone can tell."""
    log = (
        logging.getLogger("finetune.training"),
        logging.getLogger("finetune.features.linear_probe"),
    )
    before = [one.level for one in log]
    for one in log:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(log, before, strict=True):
            one.setLevel(level)


def num_devices_of(accelerator: Any, devices: Any) -> int:
    """Return how many devices of this machine the fit will have."""
    return (
        count_devices(devices) or (torch.cuda.device_count() if _is_cuda(accelerator) else 0) or 1
    )


def _first(accelerator: Any, devices: Any) -> list[int] | int:
    """Return the first device of the fit, which another than the machine's first may be."""
    names = (
        [name for name in devices.split(",") if name]
        if isinstance(devices, str) and "," in devices
        else devices
    )
    return [int(names[0])] if isinstance(names, list) and names and _is_cuda(accelerator) else 1


def _is_cuda(accelerator: Any) -> bool:
    wants = accelerator in ("auto", "gpu", "cuda") or isinstance(accelerator, CUDAAccelerator)
    return wants and torch.cuda.is_available()


@contextmanager
def _cores(num_devices: int) -> Iterator[None]:
    """Leave a device's share of the cores to torch, as Lightning does where it starts several processes."""
    before = torch.get_num_threads()
    if num_devices > 1:
        torch.set_num_threads(max(1, num_cores() // num_devices))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _order_of_gpus() -> Iterator[None]:
    """Undo what Lightning says of it once CUDA has begun here: processes that are started later would have another."""
    before = os.environ.get("CUDA_DEVICE_ORDER")
    try:
        yield
    finally:
        os.environ.pop("CUDA_DEVICE_ORDER", None)
        if before is not None:
            os.environ["CUDA_DEVICE_ORDER"] = before
