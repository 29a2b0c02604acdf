"""What is timed: training steps, and the all-reduce, of 1, 2 and 4 processes with one thread each.

All processes of a case live at once, and those that a setting does not use sleep in a barrier. So that a machine that
changes its speed in between favours none, every round goes once through all settings.
"""

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from finetune.distributed.sync_batch_norm import share_statistics
from finetune.models.backbones import build
from finetune.models.stages import batch_norms, head_name
from finetune.parity.pipeline import Pipeline, layers, partition
from finetune.parity.tensor_parallel import shard_linear

COUNTS = (1, 2, 4)
WHOLE = "batch norm of many"
LR = 0.01

Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A way of training a network on a batch, over all processes together, of noise."""

    name: str
    way: str  # ddp, gpipe, 1f1b, layer-wise
    network: str
    batch_size: int
    image_size: int
    num_steps: int  # timed one after another, after one that is not
    batch_norm: str = "none"  # or frozen, or shared
    num_classes: int = 10
    num_micro_batches: int = 1

    @property
    def alone(self) -> str:
        """What one process does to tell the model what the step on the whole batch can't."""
        return {"ddp": "half the batch", "layer-wise": "10 classes"}.get(self.way, "micro-batches")

    @property
    def settings(self) -> list[tuple[int, str]]:
        """Processes and what each does: a step together, or `alone`, also two at once that know nothing of each other.

        Batch norm of many devices does more than that of one, so that one process is timed with it, too.
        """
        whole = [(1, WHOLE)] if self.batch_norm == "shared" else []
        return [*((k, "") for k in COUNTS), (1, self.alone), (2, self.alone), *whole]


@dataclass(frozen=True)
class Transport:
    """An all-reduce of float32 tensors of several sizes, in bytes."""

    name: str
    sizes: tuple[int, ...]

    @property
    def settings(self) -> list[tuple[int, str]]:
        return [(k, str(size)) for size in self.sizes for k in COUNTS if k > 1]


def key(k: int, variant: str) -> str:
    return f"{k} {variant}".strip()


def measure(rank: int, case: Case | Transport, repeats: int, folder: str) -> None:
    """Be one of the processes; rank 0 writes {"2": [seconds of a step], …} to seconds.json.

    Args:
        rank: Of this process; there are as many as the largest setting needs.
        case: What to measure.
        repeats: Rounds through the settings of the case.
        folder: An empty folder for the result, where the processes also meet.
    """
    # torch 2.15 has another name for it, older ones have not.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=max(COUNTS))
    groups = {k: dist.new_group(range(k)) for k in COUNTS}
    own = [dist.new_group([i]) for i in range(max(COUNTS))][rank]
    is_transport = isinstance(case, Transport)
    make: Callable = all_reduce_step if is_transport else training_step
    steps = {
        (k, variant): make(case, k, variant, own if variant and not is_transport else groups[k])
        for k, variant in case.settings
        if rank < k
    }
    seconds: dict[str, list[float]] = {key(*setting): [] for setting in case.settings}
    for _ in range(repeats):
        for setting in case.settings:
            dist.barrier()
            if setting in steps:
                seconds[key(*setting)].append(timed(*steps[setting], groups[setting[0]]))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Step, num_steps: int, group: Any) -> float:
    """Return the seconds of a step by the process that takes longest."""
    step()
    dist.barrier(group)
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    seconds = torch.tensor((time.perf_counter() - started) / num_steps, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return float(seconds)


def all_reduce_step(case: Transport, k: int, variant: str, group: Any) -> tuple[Step, int]:
    tensor = torch.zeros(int(variant) // 4)
    return partial(dist.all_reduce, tensor, group=group), 100 if tensor.nbytes <= 100_000 else 5


def training_step(case: Case, k: int, variant: str, group: Any) -> tuple[Step, int]:
    """Return forward, backward and update of one setting on this process, and how many to take.

    Args:
        case: What is trained.
        k: Processes.
        variant: What each does by itself; nothing if they work together.
        group: Those that work together: this process itself where it does a variant.
    """
    torch.manual_seed(0)
    network = build(case.network, 10 if variant == "10 classes" else case.num_classes).train()
    if case.batch_norm == "frozen":
        for module in batch_norms(network):
            module.eval()
    if case.batch_norm == "shared" and (k > 1 or variant):
        share_statistics(network)
        for module in batch_norms(network):
            module.process_group = group
    shares = k if case.way == "ddp" and not variant else 2 if variant == "half the batch" else 1
    x = torch.randn(case.batch_size // shares, 3, case.image_size, case.image_size)
    y = torch.randint(10, (len(x),))
    num_pieces = case.num_micro_batches if variant == "micro-batches" else 1
    run: Callable[[Tensor, Tensor], Any]
    learns: nn.Module = network
    if k == 1 or variant:
        run = partial(forward_backward, network, num_pieces=num_pieces)
    elif case.way == "ddp":
        run = partial(
            forward_backward,
            DistributedDataParallel(network, process_group=group, broadcast_buffers=False),
        )
    elif case.way == "layer-wise":
        shard_linear(network, [head_name(network)], DeviceMesh.from_group(group, "cpu"))
        run = partial(forward_backward, network)
    else:
        parts = partition(layers(network), k)
        pipeline = Pipeline(parts, x.to("meta"), case.way, case.num_micro_batches, group=group)
        learns, run = pipeline.part, pipeline.step
    optimizer = torch.optim.SGD(learns.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        run(x, y)
        optimizer.step()

    return step, case.num_steps


def forward_backward(network: nn.Module, x: Tensor, y: Tensor, num_pieces: int = 1) -> None:
    """Leave the gradients of the mean loss, one micro-batch after another."""
    for x_piece, y_piece in zip(x.chunk(num_pieces), y.chunk(num_pieces), strict=True):
        (F.cross_entropy(network(x_piece), y_piece) / num_pieces).backward()
