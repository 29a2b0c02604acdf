"""The scenarios of test_pipeline.py and test_tensor_parallel.py in 2 and 3 processes, and their one-device reference.

`python model_parallel_scenarios.py OUT pipeline` or `tensor_parallel`.

Each scenario leaves its result in OUT/<name>_<rank>.pt. All share one process group, since starting costs seconds.
"""

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import NarrowResNet, subnets
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.models.stages import head_name
from finetune.parity.pipeline import Pipeline, layers, partition
from finetune.parity.tensor_parallel import full_state, linear_names, shard_linear

Batches = list[tuple[Tensor, Tensor]]
Task = tuple[nn.Module, Batches, float]  # a network, what it learns from, the learning rate
NUM_CLASSES = 100_000
# Rounding over 10 steps in float64: far above what was measured (3e-15 at most), far below any mistake.
TOLERANCE = 1e-10
# Wrong variants differ by more than this (4e-2 at least was measured).
WRONG = 1e-4


def train(
    step: Callable[[Tensor, Tensor], Any],
    parameters: Iterable[nn.Parameter],
    batches: Batches,
    lr: float,
) -> SGD:
    optimizer = SGD(parameters, lr, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
    return optimizer


def mean_loss(network: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(network(x), y).backward()


def draw(num_classes: int, batch_size: int, *shape: int) -> Batches:
    """Ten batches of noise."""
    return [
        (
            torch.randn(batch_size, *shape, dtype=torch.float64),
            torch.randint(num_classes, (batch_size,)),
        )
        for _ in range(10)
    ]


def linear_task() -> Task:
    torch.manual_seed(0)
    return subnets().double(), draw(100, 24, 1024), 0.1


def mlp_task(num_classes: int = 7, batch_size: int = 24) -> Task:
    """Two layers; the hidden size divides neither by 2 nor by 3."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 35), nn.ReLU(), nn.Linear(35, num_classes))
    return network.double(), draw(num_classes, batch_size, 20), 0.1


def convolution_task() -> Task:
    """Something before the head, and 10 classes, which divide by 2 but not by 3."""
    torch.manual_seed(0)
    features = (nn.Conv2d(3, 6, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
    return nn.Sequential(*features, nn.Linear(54, 10)).double(), draw(10, 12, 3, 32, 32), 0.1


def resnet_task(is_batch_norm_trained: bool = False) -> Task:
    """A random network with the running statistics of a trained one.

    Without them activations grow from block to block, and training is chaos that blows any rounding up.
    """
    torch.manual_seed(0)
    network = NarrowResNet(10).double()
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        network(torch.randn(64, 3, 32, 32, dtype=torch.float64))
    for norm in norms:
        norm.momentum = 0.1
    batches = draw(10, 6, 3, 32, 32)
    if is_batch_norm_trained:
        return network, batches[:3], 1e-3  # three steps are enough to see what is wrong
    return network.eval(), batches, 1e-3


TASKS = {
    "subnets": linear_task,
    "mlp": mlp_task,
    "convolution": convolution_task,
    "resnet": resnet_task,
    "trained": partial(resnet_task, is_batch_norm_trained=True),
    "huge": partial(mlp_task, NUM_CLASSES, batch_size=3),
}


@functools.cache
def alone(task: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of one device."""
    network, batches, lr = TASKS[task]()
    losses = []

    def step(x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        losses.append(loss.item())

    train(step, network.parameters(), batches, lr)
    return network.state_dict(), losses


def load(folder: Path, name: str, rank: int) -> Any:
    return torch.load(folder / f"{name}_{rank}.pt", weights_only=True)


def pipelined(
    task: Task, schedule: str, num_micro_batches: int, loss: Callable = F.cross_entropy
) -> dict[str, Any]:
    """Train over all processes, each of which gets only what it needs."""
    network, batches, lr = copy.deepcopy(task)
    rank, k = dist.get_rank(), dist.get_world_size()
    parts = partition(layers(network), k)
    pipeline = Pipeline(
        parts, torch.empty_like(batches[0][0], device="meta"), schedule, num_micro_batches, loss
    )
    losses: list[Tensor | None] = []

    def step(x: Tensor, y: Tensor) -> None:
        losses.append(pipeline.step(x if rank == 0 else None, y if rank == k - 1 else None))

    with sends() as sent:
        train(step, pipeline.part.parameters(), batches, lr)
    return {"weights": pipeline.full_state(), "losses": losses, "sent": sum(sent) / len(batches)}


@contextmanager
def sends() -> Iterator[list[int]]:
    """Record the bytes of each tensor that is sent to another process."""
    sent: list[int] = []
    original = dist.P2POp

    def recorded(op: Any, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if op is dist.isend:
            sent.append(tensor.nbytes)
        return original(op, tensor, *arguments, **options)

    with patch.object(dist, "P2POp", recorded):
        yield sent


class Collectives(TorchDispatchMode):
    """Record the name and the bytes given to each collective that DTensor issues."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor come first: it calls the collectives
        if func.namespace == "_c10d_functional" and func._opname not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.seen.append((func._opname, args[0].nbytes))
        return func(*args, **(kwargs or {}))


def sharded(
    task: Task, names: list[str], shard: Callable[[nn.Module], nn.Module]
) -> dict[str, Any]:
    """Train a network of which `shard` spreads the layers `names`."""
    network, batches, lr = copy.deepcopy(task)
    with torch.no_grad():
        for name in names:  # only the first device's values may count
            network.get_submodule(name).weight.add_(dist.get_rank())
            network.get_submodule(name).bias.add_(dist.get_rank())
    shard(network)
    with Collectives() as collectives:
        optimizer = train(partial(mean_loss, network), network.parameters(), batches, lr)
    held = {}
    for name in names:
        weight: Any = network.get_submodule(name).weight
        bias: Any = network.get_submodule(name).bias
        momentum = (optimizer.state[parameter]["momentum_buffer"] for parameter in (weight, bias))
        local = [tensor.to_local() for tensor in (weight, bias, weight.grad, bias.grad, *momentum)]
        held[name] = [(tuple(tensor.shape), tensor.untyped_storage().nbytes()) for tensor in local]
    logits = network(batches[0][0])
    return {
        "weights": full_state(network),
        "collectives": collectives.seen,
        "held": held,
        "logits": (type(logits).__name__, tuple(logits.shape), float(logits.detach().sum())),
    }


class ForgottenReduction(nn.Module):
    """Control: a column-wise head made by hand, where each device goes backward through its own logits alone."""

    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(p.detach().chunk(dist.get_world_size())[dist.get_rank()].clone())
            for p in full.parameters()
        )

    def forward(self, x: Tensor) -> Tensor:
        own = F.linear(x, self.weight, self.bias)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.detach().contiguous())
        parts[dist.get_rank()] = own
        return torch.cat(parts, dim=1)


def forgotten_reduction() -> dict[str, Tensor]:
    network, batches, lr = mlp_task(num_classes=6)
    network[2] = ForgottenReduction(network[2])  # type: ignore[arg-type]
    train(partial(mean_loss, network), network.parameters(), batches, lr)
    return {
        name: value.detach() for name, value in network.state_dict().items() if name.startswith("0")
    }


def refused() -> list[str]:
    """The messages of pipelines that can't be."""
    parts, messages = partition(layers(subnets()), dist.get_world_size()), []
    cases = [(12, "gpipe", 5), (12, "1f1b", 1), (12, "zigzag", 3)]
    for batch_size, schedule, num_micro_batches in cases:
        try:
            Pipeline(parts, torch.empty(batch_size, 1024), schedule, num_micro_batches)
        except ValueError as error:
            messages.append(str(error))
    return messages


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # A schedule that waits for what nobody sends ends here, not at the end of the test's patience.
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    k = dist.get_world_size()
    mesh = init_device_mesh("cpu", (k,))
    linear = linear_task()
    resnet = resnet_task()
    mlp = mlp_task()
    convolution, huge = convolution_task(), mlp_task(NUM_CLASSES, batch_size=3)
    trained_norm = resnet_task(is_batch_norm_trained=True)

    def all_linear(network: nn.Module) -> nn.Module:
        return shard_linear(network, linear_names(network), mesh)

    def head(network: nn.Module) -> nn.Module:
        return shard_linear(network, [head_name(network)], mesh)

    pipeline: dict[str, Callable[[], Any]] = {
        "subnets_gpipe": lambda: pipelined(linear, "gpipe", 4),
        "subnets_1f1b": lambda: pipelined(linear, "1f1b", 4),
        "resnet": lambda: pipelined(resnet, "gpipe" if k == 2 else "1f1b", 3),
        "refused": refused,
    }
    pipeline_of_two: dict[str, Callable[[], Any]] = {
        "trained_norm_whole": lambda: pipelined(trained_norm, "gpipe", 1),
        "control_trained_norm": lambda: pipelined(trained_norm, "gpipe", 3),
        "control_sum": lambda: pipelined(
            linear, "gpipe", 4, lambda *pair: 4 * F.cross_entropy(*pair)
        ),
    }
    spread: dict[str, Callable[[], Any]] = {
        "subnets_linear": lambda: sharded(linear, ["0", "2", "4"], all_linear),
        "mlp_linear": lambda: sharded(mlp, ["0", "2"], all_linear),
        "convolution_head": lambda: sharded(convolution, ["4"], head),
        "huge_head": lambda: sharded(huge, ["2"], head),
        "control_forgotten_reduction": forgotten_reduction,
    }
    scenarios = pipeline if sys.argv[2] == "pipeline" else spread
    if k == 2 and sys.argv[2] == "pipeline":
        scenarios |= pipeline_of_two
    for name, scenario in scenarios.items():
        torch.save(scenario(), out / f"{name}_{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
