"""Timing of the parts of training: reading and augmenting images, the data loader alone, the parts of a step."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.data.datamodule import ImageDataModule
from finetune.data.decode import DecodeError
from finetune.data.samplers import augmentation_seed
from finetune.data.transforms import set_random_seed
from finetune.training.classifier import Classifier

# Every result is a list of seconds, each for the work of one batch.


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def torch_threads(num: int) -> Iterator[None]:
    """Let torch compute with this many threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clocked(action: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result of an action, and the seconds until the device has finished it."""
    synchronize(device)
    began = time.perf_counter()
    result = action()
    synchronize(device)
    return result, time.perf_counter() - began


def timed(action: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls, after a warm-up call."""
    return [clocked(action, device)[1] for _ in range(repeats + 1)][1:]


def reading(data: ImageDataModule, num: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds that one core takes to decode, to read from the cache and to augment `num` images.

    Each repeat uses different images, as far as there are enough: the system caches files that were read before.
    Images that cannot be decoded are skipped.
    """
    data.use_cache()
    dataset = data.image_dataset("train", train=True)
    samples = data.splits["train"]
    files = replace(samples, cached=None)
    parts: dict[str, list[float]] = {"decode": [], "cache": [], "augment": []}
    for repeat in range(repeats):
        seconds = dict.fromkeys(parts, 0.0)
        for i in (j % len(dataset) for j in range(repeat * num, (repeat + 1) * num)):
            clock = time.perf_counter()
            try:
                image = files.read(i)
            except DecodeError:
                continue
            clock = _add(seconds, "decode", clock)
            if samples.cached is not None:
                samples.read(i).sum()
                clock = _add(seconds, "cache", clock)
            set_random_seed(dataset.transform, augmentation_seed(dataset.seed, repeat, i))
            dataset.transform(image=image)
            _add(seconds, "augment", clock)
        for name, sum_of_seconds in seconds.items():
            if sum_of_seconds:
                parts[name].append(sum_of_seconds)
    return {name: values for name, values in parts.items() if values}


def _add(seconds: dict[str, float], name: str, since: float) -> float:
    """Add the seconds since a time to a part, and return the time now."""
    now = time.perf_counter()
    seconds[name] += now - since
    return now


def loading(data: ImageDataModule, num: int, repeats: int) -> list[float]:
    """Return the seconds per batch of `num` images from the training data loader, while nothing else runs.

    Workers deliver batches in turns. So each measurement spans one turn of all workers. The first turns, in which the
    loader starts, do not count. If an epoch is too short to measure, the result is empty.
    """
    seconds: list[float] = []
    while len(seconds) < repeats:
        loader = data.loader("train", train=True)
        arrivals = []
        turn = max(1, loader.num_workers)
        for batch in loader:
            if len(batch["label"]) < num:
                break
            arrivals.append(time.perf_counter())
            if len(arrivals) > turn * (2 + repeats - len(seconds)):
                break
        ends = arrivals[2 * turn :: turn]
        if len(ends) < 2:
            return []
        seconds += [(later - earlier) / turn for earlier, later in itertools.pairwise(ends)]
    return seconds[:repeats]


class StepParts:
    """The parts of a training step on one batch, with the network, precision and optimizer of the run.

    The learning rate is 0, so that the weights do not change. The statistics of batch norm do change.

    Args:
        model: A model that is attached to a trainer on one device.
        batch: A batch on the model's device.
    """

    def __init__(self, model: Classifier, batch: dict[str, Any]) -> None:
        self.model = model
        self.device = model.device
        images = batch["image"]
        self.target = model.task.target(batch)
        self.inputs: Tensor = model.image_classifier.normalized(images)
        self.optimizer = _idle_optimizer(model)

    def forward(self) -> Tensor:
        """Return the loss."""
        with self.model.trainer.precision_plugin.forward_context():
            logits = self.model.network(self.inputs)
        weight = self.model.class_weight
        return self.model.task.loss_sum(logits, self.target, weight) / self.target.weight(weight)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, repeats: int) -> dict[str, list[float]]:
        """Return the seconds of each part alone: on a GPU, nothing overlaps."""
        parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        for repeat in range(repeats + 1):
            loss, forward = clocked(self.forward, self.device)
            _, backward = clocked(loss.backward, self.device)
            _, update = clocked(self.update, self.device)
            for name, seconds in zip(parts, (forward, backward, update), strict=True):
                if repeat > 0:  # the first is a warm-up
                    parts[name].append(seconds)
        return parts


def _idle_optimizer(model: Classifier) -> Optimizer:
    configured = model.configure_optimizers()
    optimizer = configured[0][0] if isinstance(configured, tuple) else configured
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer
