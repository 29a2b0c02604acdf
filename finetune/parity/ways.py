"""Train one job in every way of using several devices, each compared with one device.

Ways that need several processes run one after another in one set of them, a process for each device.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from finetune.distributed.sync_batch_norm import share_statistics
from finetune.models.backbones import build
from finetune.parity import data_parallel
from finetune.parity.branches import Branches, Siamese
from finetune.parity.pipeline import SCHEDULES, Pipeline, layers, partition
from finetune.parity.tensor_parallel import full_state, linear_names, shard_linear

# Shapes: B images in a batch, k devices.

LR = 0.1
_NUM_CLASSES = 10
_IMAGES_PER_DEVICE = 16

State = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]  # images (B, 3, 28, 28) in [0, 1], class indices (B,)
Step = Callable[[Tensor, Tensor], Any]


class Job(NamedTuple):
    """A training job: `steps` batches of images on `k` devices. Its processes write into `folder`."""

    folder: Path
    k: int
    steps: int
    dtype: torch.dtype
    is_cuda: bool

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank."""
        return torch.device("cuda", rank) if self.is_cuda else torch.device("cpu")


class Trained(NamedTuple):
    """The result of training: the weights on each device, and the median of the seconds of a step."""

    states: list[State]
    seconds: float


class Row(NamedTuple):
    """A way of training, compared with one device.

    Attributes:
        name: The way.
        network: The network.
        devices: Number of devices.
        difference: The largest difference of any weight on any device from that of one device.
        moved: The largest change of any weight since the start.
        seconds: The median of the seconds of a step.
        skipped: Why it was skipped; "" if it was not.
    """

    name: str
    network: str
    devices: int
    difference: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0
    skipped: str = ""


def compare(job: Job, report_status: Callable[[str], None] = lambda name: None) -> Iterator[Row]:
    """Train in every way, and yield a row for each.

    Args:
        job: What to train.
        report_status: Called with the name of each way before it starts.
    """
    _compute_exactly()
    devices = [job.device(rank) for rank in range(job.k)]
    report_status("one device")
    batches = _draw_batches(job)
    starts = {"lenet": _lenet(job.dtype), "normed": _normed(job.dtype)}
    single = {
        name: _trained(copy.deepcopy(network), batches, devices[0])
        for name, network in starts.items()
    }

    def row(name: str, network: str, trained: Trained, num_devices: int = job.k) -> Row:
        reference = single[network].states[0]
        start = {name: value.detach() for name, value in starts[network].named_parameters()}
        return Row(
            name,
            network,
            num_devices,
            difference=max(distance(state, reference) for state in trained.states),
            moved=distance({name: reference[name] for name in start}, start),
            seconds=trained.seconds,
        )

    yield row("one device", "lenet", single["lenet"], 1)
    report_status("by hand")
    yield row("by hand", "lenet", _by_hand(starts["lenet"], batches, devices))
    report_status("processes")
    torch.multiprocessing.spawn(_process, (job, starts, batches), nprocs=job.k)
    of_ranks = [torch.load(job.folder / f"{rank}.pt", weights_only=True) for rank in range(job.k)]
    for name, (network, _) in WAYS.items():
        results = [of_rank[name] for of_rank in of_ranks]
        if isinstance(results[0], str):
            yield Row(name, network, job.k, skipped=results[0])
        else:
            states, seconds = zip(*results, strict=True)
            yield row(name, network, Trained([*states], max(seconds)))
    report_status("branches")
    starts["lstm"], single["lstm"], trained = _branches(job)
    yield row("branches", "lstm", trained, 2)


def _compute_exactly() -> None:
    """Let GPUs compute in full float32, so that results differ only by rounding."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def _draw_batches(job: Job) -> Batches:
    """Return batches of coloured blobs.

    Plain noise does not work: its images are so similar that a unit may be zero for all of them. Rounding then decides
    whether it trains.
    """
    torch.manual_seed(0)
    size = job.k * _IMAGES_PER_DEVICE
    blobs = torch.rand(job.steps * size, 3, 4, 4)
    images = F.interpolate(blobs, size=28, mode="bicubic").clamp(0, 1).to(job.dtype)
    labels = torch.randint(_NUM_CLASSES, (len(images),))
    return [*zip(images.split(size), labels.split(size), strict=True)]


def _lenet(dtype: torch.dtype) -> nn.Module:
    """Return a LeNet with torch's default weights, which change more in training than the book's."""
    network = build("lenet", _NUM_CLASSES)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()
    return network.to(dtype)


def _normed(dtype: torch.dtype) -> nn.Module:
    """Return a network with batch norm."""
    stem = (nn.Conv2d(3, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
    return nn.Sequential(*stem, nn.Linear(16 * 6 * 6, _NUM_CLASSES)).to(dtype)


def _trained(
    network: nn.Module, batches: Batches, device: torch.device, part: slice = slice(None)
) -> Trained:
    """Train on the mean loss of each batch, or of a part of it, by SGD."""
    network.to(device)

    def backward(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(network(x[part].to(device)), y[part].to(device)).backward()

    seconds = _timed(_sgd_step(network, backward), batches, [device])
    return Trained([_on_cpu(network.state_dict())], seconds)


def _by_hand(start: nn.Module, batches: Batches, devices: Sequence[torch.device]) -> Trained:
    """Train the functional LeNet of `data_parallel`, whose linear weights are transposed."""

    def turned(state: State) -> State:
        return {name: value.T if value.dim() == 2 else value for name, value in state.items()}

    params = turned(start.state_dict())
    replicas = [data_parallel.get_params([*params.values()], device) for device in devices]

    def step(x: Tensor, y: Tensor) -> None:
        data_parallel.train_batch(x.mean(dim=1, keepdim=True), y, replicas, devices, LR)

    seconds = _timed(step, batches, devices)
    states = [dict(zip(params, replica, strict=True)) for replica in replicas]
    return Trained([_on_cpu(turned(state)) for state in states], seconds)


def _ddp(network: nn.Module, batches: Batches, job: Job, rank: int) -> Trained:
    """Train as `finetune fit` does on several devices: each has a part of the batch, and gradients are averaged."""
    share_statistics(network)
    network.to(job.device(rank))
    part = slice(rank * _IMAGES_PER_DEVICE, (rank + 1) * _IMAGES_PER_DEVICE)
    trained = _trained(DistributedDataParallel(network), batches, job.device(rank), part)
    state = {name.removeprefix("module."): value for name, value in trained.states[0].items()}
    return Trained([state], trained.seconds)


def _pipeline(schedule: str, network: nn.Module, batches: Batches, job: Job, rank: int) -> Trained:
    device = job.device(rank)
    parts = partition(layers(network), job.k)
    pipeline = Pipeline(parts, batches[0][0], schedule, 2 * job.k, device=device)
    seconds = _timed(_sgd_step(pipeline.part, pipeline.step), batches, [device])
    return Trained([pipeline.full_state()], seconds)


def _layer_wise(network: nn.Module, batches: Batches, job: Job, rank: int) -> Trained:
    device = job.device(rank)
    mesh = init_device_mesh(device.type, (job.k,))
    network = shard_linear(network.to(device), linear_names(network), mesh)
    trained = _trained(network, batches, device)
    return Trained([_on_cpu(full_state(network))], trained.seconds)


# The ways of several processes, each with its network.
WAYS: dict[str, tuple[str, Callable[[nn.Module, Batches, Job, int], Trained]]] = {
    "ddp": ("lenet", _ddp),
    "ddp batch norm": ("normed", _ddp),
    **{f"pipeline {name}": ("lenet", partial(_pipeline, name)) for name in SCHEDULES},
    "layer-wise": ("lenet", _layer_wise),
}


def _process(rank: int, job: Job, starts: dict[str, nn.Module], batches: Batches) -> None:
    """Train in all `WAYS` as one of the processes, and write the weights and the seconds of this rank to a file."""
    torch.set_num_threads(1)
    _compute_exactly()
    if job.is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if job.is_cuda else "gloo",
        f"file://{job.folder / 'rendezvous'}",
        rank=rank,
        world_size=job.k,
        timeout=timedelta(minutes=1),
    )
    results: dict[str, Any] = {}
    for name, (network, train) in WAYS.items():
        try:
            trained = train(copy.deepcopy(starts[network]), batches, job, rank)
            results[name] = (trained.states[0], trained.seconds)
        except ValueError as error:  # it cannot be divided into so many parts
            results[name] = str(error)
    torch.save(results, job.folder / f"{rank}.pt")
    dist.destroy_process_group()


def _branches(job: Job) -> tuple[Siamese, Trained, Trained]:
    """Train a shared LSTM on two devices.

    Returns:
        The initial network, the result on one device, and the result on two devices.
    """
    torch.manual_seed(0)
    start = Siamese().to(job.dtype)
    size = job.k * _IMAGES_PER_DEVICE
    inputs = torch.randn(job.steps, 2, size, 140, 256, dtype=job.dtype)
    batches = [(x, torch.randint(2, (size,)).to(job.dtype)) for x in inputs]
    has_gpus = torch.cuda.device_count() > 1
    devices = [torch.device("cuda", i) if has_gpus else torch.device("cpu") for i in range(2)]
    single = copy.deepcopy(start).to(devices[0])
    split = Branches(start, devices)

    def backward(x: Tensor, y: Tensor) -> None:
        F.binary_cross_entropy_with_logits(single(x.to(devices[0])), y.to(devices[0])).backward()

    single_seconds = _timed(_sgd_step(single, backward), batches, devices[:1])
    split_seconds = _timed(_sgd_step(split, split.step), batches, devices)
    # Both copies of the LSTM are compared with the one on a single device.
    copies = [{f"lstm.{n}": v for n, v in lstm.state_dict().items()} for lstm in split.copies]
    split_states = [{**split.full_state(), **_on_cpu(copied)} for copied in copies]
    return (
        start,
        Trained([_on_cpu(single.state_dict())], single_seconds),
        Trained(split_states, split_seconds),
    )


def _timed(step: Step, batches: Batches, devices: Sequence[torch.device]) -> float:
    """Take a step on each batch; return the median of the seconds but of the first, which includes initialization."""
    seconds = []
    for x, y in batches:
        started = time.perf_counter()
        step(x, y)
        data_parallel.synchronize(devices)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:] or seconds)


def distance(a: State, b: State) -> float:
    """Return the largest difference between the weights of two networks. NaN counts as infinite."""
    assert a.keys() == b.keys()
    return max(
        float((a[name].double() - b[name].double()).abs().nan_to_num(torch.inf).max()) for name in a
    )


def _sgd_step(network: nn.Module, backward: Step) -> Step:
    """Return a step of plain SGD with the gradients that `backward` leaves in the network."""
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        backward(x, y)
        optimizer.step()

    return step


def _on_cpu(state: State) -> State:
    """Return a copy of a state dict on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in state.items()}
