"""The kinds of parallelism that need one process, and the functions that all kinds share."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.data.datasets.image_folder import ImageFolderData
from finetune.models.backbones import build
from finetune.parity import data_parallel
from finetune.parity.branches import Branches, Siamese

LR = 0.1
_NUM_CLASSES = 10
CLASS_NAMES = [f"class{i}" for i in range(_NUM_CLASSES)]

State = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]  # images (B, 3, 28, 28) uint8, class indices (B,)


@dataclass(frozen=True)
class Job:
    """A training job: `steps` batches of `batch_size` images on `k` devices, with all files in `folder`."""

    folder: Path
    k: int
    steps: int
    dtype: str
    is_cuda: bool
    batch_size: int

    @property
    def data(self) -> dict[str, Any]:
        """Arguments of the data module: all images are for training, and they are not resized or augmented."""
        return {
            "root": str(self.folder / "data"),
            "batch_size": self.batch_size,
            "val_fraction": 0,
            "image_size": 28,
            "resize": "whole",
            "crop_and_flip": False,
            "augmentations": None,
        }


@dataclass
class Trained:
    """The result of training: the weights on each device, and the median of the seconds of a step."""

    states: list[State]
    seconds: float


def disable_tf32() -> None:
    """Let GPUs compute in full float32, so that results differ only by rounding."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def draw_batches(job: Job) -> Batches:
    """Write coloured blobs as an image folder, and return the batches of the first epoch on one device.

    Plain noise does not work: its images are so similar that a unit may be zero for all of them. Rounding then decides
    whether it trains.
    """
    rng = np.random.default_rng(0)
    for i in range(job.batch_size * job.steps):
        folder = job.folder / "data/train" / CLASS_NAMES[i % _NUM_CLASSES]
        folder.mkdir(parents=True, exist_ok=True)
        blobs = rng.integers(0, 256, (4, 4, 3), np.uint8)
        cv2.imwrite(
            str(folder / f"{i:06d}.png"), cv2.resize(blobs, (28, 28), interpolation=cv2.INTER_CUBIC)
        )
    data = ImageFolderData(**job.data, num_workers=0)
    return [(batch["image"], batch["label"]) for batch in data.loader("train", train=True)]


def initial_network(name: str, job: Job) -> nn.Module:
    """Return a network with torch's default random weights, and write them to a file.

    They change more in training than the book's weights.
    """
    torch.manual_seed(0)
    network = build(name, _NUM_CLASSES)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()
    torch.save(network.state_dict(), job.folder / f"{name}.pt")
    return network.to(getattr(torch, job.dtype))


def on_one_device(start: nn.Module, batches: Batches, device: torch.device) -> Trained:
    """Train on one device: the complete batch, its mean loss, SGD."""
    network = copy.deepcopy(start).to(device)
    dtype = next(network.parameters()).dtype

    def backward(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(network(x.to(device, dtype) / 255), y.to(device)).backward()

    seconds = timed(sgd_step(network, backward), batches, [device])
    return Trained([on_cpu(network.state_dict())], seconds)


def by_hand(start: nn.Module, batches: Batches, devices: Sequence[torch.device]) -> Trained:
    """Train the functional LeNet of `data_parallel`, whose linear weights are transposed."""
    names = list(start.state_dict())
    # (in, out) instead of (out, in)
    transposed = {name for name, value in start.state_dict().items() if value.dim() == 2}
    params = [
        value.T if name in transposed else value for name, value in start.state_dict().items()
    ]
    replicas = [data_parallel.get_params(params, device) for device in devices]

    def step(x: Tensor, y: Tensor) -> None:
        grey = x.to(params[0].dtype).mean(dim=1, keepdim=True) / 255
        data_parallel.train_batch(grey, y, replicas, devices, LR)

    seconds = timed(step, batches, devices)
    states = [dict(zip(names, replica, strict=True)) for replica in replicas]
    return Trained(
        [on_cpu({n: p.T if n in transposed else p for n, p in state.items()}) for state in states],
        seconds,
    )


def branches(job: Job) -> tuple[Siamese, Trained, Trained]:
    """Train a shared LSTM on two devices.

    Returns:
        The initial network, the result on one device, and the result on two devices.
    """
    torch.manual_seed(0)
    dtype = getattr(torch, job.dtype)
    start = Siamese().to(dtype)
    inputs = torch.randn(job.steps, 2, job.batch_size, 140, 256, dtype=dtype)
    batches = [(x, torch.randint(2, (job.batch_size,)).to(dtype)) for x in inputs]
    devices = [
        torch.device("cuda", i) if torch.cuda.device_count() > 1 else torch.device("cpu")
        for i in range(2)
    ]
    single = copy.deepcopy(start).to(devices[0])
    split = Branches(start, devices)

    def backward(x: Tensor, y: Tensor) -> None:
        F.binary_cross_entropy_with_logits(single(x.to(devices[0])), y.to(devices[0])).backward()

    single_seconds = timed(sgd_step(single, backward), batches, devices[:1])
    split_seconds = timed(sgd_step(split, split.step), batches, devices)
    # Both copies of the LSTM are compared with the one on a single device.
    copies = [{f"lstm.{n}": v for n, v in lstm.state_dict().items()} for lstm in split.copies]
    split_states = [{**split.full_state(), **on_cpu(copied)} for copied in copies]
    return (
        start,
        Trained([on_cpu(single.state_dict())], single_seconds),
        Trained(split_states, split_seconds),
    )


def timed(
    step: Callable[[Tensor, Tensor], Any], batches: Batches, devices: Sequence[torch.device]
) -> float:
    """Take a step on each batch and return the median of their seconds."""
    seconds = []
    for x, y in batches:
        started = time.perf_counter()
        step(x, y)
        data_parallel.synchronize(devices)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def distance(a: State, b: State) -> float:
    """Return the largest difference between the weights of two networks. NaN counts as infinite."""
    assert a.keys() == b.keys()
    return max(
        float((a[name].double() - b[name].double()).abs().nan_to_num(torch.inf).max()) for name in a
    )


def sgd_step(
    network: nn.Module, backward: Callable[[Tensor, Tensor], Any]
) -> Callable[[Tensor, Tensor], None]:
    """Return a step of plain SGD with the gradients that `backward` leaves in the network."""
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        backward(x, y)
        optimizer.step()

    return step


def median(seconds: Sequence[float]) -> float:
    """Return the median of the seconds of all steps but the first, which includes initialization."""
    return statistics.median(seconds[1:] or seconds)


def on_cpu(state: State) -> State:
    """Return a copy of a state dict on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in state.items()}
