"""A model of the time of a training step on k devices, and the published figures that carry it to GPUs.

    step = contention x (shared / k + repeated) + messages x latency + bytes / bandwidth

`shared` is work that the devices share out, `repeated` what each of them does whole (an update of all weights, the
network before a spread head). Where there are fewer cores than devices, k turns taken on them make it
(shared + k repeated) / cores. `contention` is how much slower a process is beside another one that it has nothing to do
with: they share the memory. Nothing is taken to overlap on a CPU: a message is work for the same cores. What overlaps
on GPUs, which share nothing, is said at `Machine`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scaling import communication_volume
from benchmarks.scaling.steps import WHOLE, Case, key
from finetune.models.backbones import build
from finetune.models.stages import batch_norms, head_name
from finetune.parity.pipeline import layers, partition

# DDP closes a bucket of gradients when it has this many bytes or more, the first one and the others:
# torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, DistributedDataParallel(bucket_cap_mb=25).
BUCKET_BYTES = (2**20, 25 * 2**20)


class Link(NamedTuple):
    """Seconds that a message takes whatever its size, and bytes that a device sends in a second."""

    latency: float
    bandwidth: float


class Work(NamedTuple):
    """Seconds on one device: what is shared out, and what every device does whole."""

    shared: float
    repeated: float = 0.0
    stretch: float = 1.0  # the slowest device takes this many times shared / k
    contention: float = 1.0  # how much slower all is when all cores are busy


def all_reduce_bytes(num_bytes: float, k: int) -> float:
    """Return what a device sends when k of them sum up a tensor round a ring, as in `communication_volume`."""
    return 2 * (k - 1) / k * num_bytes


def link_of(seconds: Mapping[int, float], k: int) -> Link:
    """Return latency and bandwidth from the seconds of all-reduces by their bytes: least squares of relative errors."""
    rows = np.array([[1, all_reduce_bytes(num_bytes, k)] for num_bytes in seconds], float)
    times = np.array(list(seconds.values()))
    (latency, per_byte), *_ = np.linalg.lstsq(
        rows / times[:, None], np.ones(len(times)), rcond=None
    )
    return Link(float(latency), float(1 / per_byte))


def work_of(case: Case, seconds: Mapping[str, float], k: int) -> Work:
    """Return a case's work on k devices from what processes take that exchange nothing.

    Args:
        case: What is trained.
        seconds: Of a step by setting, as `steps.measure` names them.
        k: Devices to come.
    """
    whole, other = seconds.get(key(1, WHOLE), seconds["1"]), seconds[key(1, case.alone)]
    contention = seconds[key(2, case.alone)] / other
    if case.way == "layer-wise":
        return Work(whole - other, other, 1, contention)
    if case.way == "ddp":
        repeated = max(0.0, 2 * other - whole)
        return Work(whole - repeated, repeated, 1, contention)
    m = case.num_micro_batches
    return Work(other, 0, k * max(part_shares(case, k)) * (m + k - 1) / m, contention)


def compute_seconds(work: Work, k: int, cores: int) -> float:
    """Return the seconds of all work on k devices that take turns on `cores`: one's gaps are filled by the others."""
    on_k = work.stretch * work.shared / k + work.repeated
    return work.contention * max(on_k, (work.shared + k * work.repeated) / min(k, cores))


def step_seconds(case: Case, work: Work, k: int, cores: int, link: Link) -> float:
    """Return the seconds of a step on k processes of a CPU."""
    messages, num_bytes = messages_and_bytes(case, k)
    return compute_seconds(work, k, cores) + messages * link.latency + num_bytes / link.bandwidth


def messages_and_bytes(case: Case, k: int) -> tuple[int, float]:
    """Return how often, and how many bytes, a device sends in a step: the device that sends most."""
    network, x = untrained(case.network, case.num_classes), batch_of(case)
    if k == 1:
        return 0, 0
    if case.way == "layer-wise":  # the logits, and the gradient of the head's input
        return 2, communication_volume.linear_bytes(
            network, [head_name(network)], case.batch_size, k
        )[0]
    if case.way == "ddp":
        messages, num_bytes = (
            len(buckets(network)),
            float(communication_volume.data_parallel_bytes(network, k)[0]),
        )
        if case.batch_norm == "shared":
            more, more_bytes = statistics_sent(network, k)
            return messages + more, num_bytes + more_bytes
        return messages, num_bytes
    neighbours = min(k - 1, 2)  # one message to each for each micro-batch
    return neighbours * case.num_micro_batches, max(
        communication_volume.pipeline_bytes(partition(layers(network), k), x)
    )


def statistics_sent(network: nn.Module, k: int) -> tuple[int, float]:
    """Return messages and bytes of batch norm over all devices: `SharedBatchNorm` gathers mean, squares and
    count of each layer, and sums two values a channel on the way back."""
    channels = [module.num_features for module in batch_norms(network)]  # type: ignore[union-attr]
    num_bytes = sum(
        (k - 1) * 4 * (2 * num + 1) + all_reduce_bytes(4 * 2 * num, k) for num in channels
    )
    return 2 * len(channels), num_bytes


def buckets(network: nn.Module) -> list[int]:
    """Return the bytes of DDP's buckets in the order of the backward pass, as torch's reducer fills them."""
    filled: list[int] = [0]
    for parameter in reversed(list(network.parameters())):
        if filled[-1] >= BUCKET_BYTES[min(len(filled) - 1, 1)]:
            filled.append(0)
        filled[-1] += parameter.nbytes
    return filled


@cache
def untrained(network: str, num_classes: int) -> nn.Module:
    """Return a network without data (device "meta")."""
    with torch.device("meta"):
        return build(network, num_classes)


def batch_of(case: Case) -> torch.Tensor:
    return torch.empty(case.batch_size, 3, case.image_size, case.image_size, device="meta")


@cache
def part_shares(case: Case, k: int) -> list[float]:
    """Return each pipeline part's share of the network's multiplications."""
    x, found = batch_of(case), []
    for part in partition(layers(untrained(case.network, case.num_classes)), k):
        with FlopCounterMode(display=False) as counter:
            x = part(x)
        found.append(counter.get_total_flops())
    return [num / sum(found) for num in found]


@dataclass(frozen=True)
class Machine:
    """GPU machines with published figures; figures are per second, sources in docs/parallelism.md.

    Buckets are summed during the backward pass, which is two thirds of the computation; the last bucket is summed after
    it. Computation waits for the statistics of batch norm. Not modelled: reading images, kernels too small to fill a
    GPU, GPUs that wait for the slowest one.
    """

    name: str
    images_per_second: float  # of ResNet-18 at 224 pixels, trained by one GPU
    nvlink: float  # bytes of an all-reduce that one GPU sends
    network: float  # bytes of an all-reduce that one machine sends
    gpus: int = 8

    def bandwidth(self, k: int) -> float:
        return self.nvlink if k <= self.gpus else min(self.nvlink, self.network)

    def latency(self, k: int, is_small: bool) -> float:
        """Return the seconds of an all-reduce of next to nothing, by NCCL's own estimate of its tree algorithm.

        Source: baseLat and hwLat in src/graph/tuning.cc, protocols LL (small) and Simple, in microseconds.
        """
        base, nvlink, network = (6.8, 0.6, 5.0) if is_small else (8.4, 4.0, 14.0)
        machines = math.ceil(k / self.gpus)
        return 1e-6 * (base + 2 * ((k / machines - 1) * nvlink + math.log2(machines) * network))

    def step(
        self, network: nn.Module, k: int, batch_size: int, batch_norm: str, overlap: bool = True
    ) -> float:
        """Return the predicted seconds of a step of ddp on k GPUs; `batch_norm` is frozen or shared."""
        compute = batch_size / k / self.images_per_second
        if k == 1:
            return compute
        sums = [
            self.latency(k, False) + all_reduce_bytes(num, k) / self.bandwidth(k)
            for num in buckets(network)
        ]
        exposed = max(sums[-1], sum(sums) - 2 / 3 * compute) if overlap else sum(sums)
        if batch_norm == "shared":
            messages, num_bytes = statistics_sent(network, k)
            exposed += messages * self.latency(k, True) + num_bytes / self.bandwidth(k)
        return compute + exposed

    def efficiency(
        self, network: nn.Module, k: int, batch_size: int, batch_norm: str, overlap: bool = True
    ) -> float:
        """Return the speed-up over one GPU divided by k."""
        one = self.step(network, 1, batch_size, batch_norm)
        return one / k / self.step(network, k, batch_size, batch_norm, overlap)


A100 = Machine("A100, 100 Gbit/s a machine", 5_500, 200e9, 12e9)
MACHINES: Sequence[Machine] = (
    A100,
    replace(A100, name="A100, 400 Gbit/s a machine", network=47e9),
    replace(A100, name="A100, 8 x 200 Gbit/s a machine", network=8 * 24e9),
    Machine("twice as fast (H100), 8 x 400 Gbit/s a machine", 11_000, 370e9, 8 * 47e9),
)
