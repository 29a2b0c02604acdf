"""Pipeline parallelism: a network is split between its layers, with one part per process.

The processes work on different micro-batches at the same time. Together they compute the same as one device, up to
rounding.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torchvision.models import ResNet

# Shapes: B samples in a batch, K classes, k devices.

# GPipe (arXiv:1811.06965) runs all micro-batches forward, then all backward. 1F1B (PipeDream, arXiv:1806.03377) runs
# each backward as early as possible, so that process i of k stores the activations of only k - i micro-batches.
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def layers(network: nn.Module) -> list[nn.Sequential]:
    """Return the smallest parts into which a network can be split, in forward order. They share its weights and names.

    A ResNet is split between its stages, an `nn.Sequential` before each module with weights.

    Raises:
        ValueError: The network is neither of the two.
    """
    children = dict(network.named_children())
    if isinstance(network, ResNet):
        children |= {"flatten": nn.Flatten(), "fc": children.pop("fc")}
        starts = ["conv1", "layer2", "layer3", "layer4"]
    elif isinstance(network, nn.Sequential):
        starts = [
            name for name, child in children.items() if next(child.parameters(), None) is not None
        ]
    else:
        raise ValueError(
            f"{type(network).__name__} cannot be split between layers: only a ResNet or an nn.Sequential can"
        )
    parts: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for name, child in children.items():
        if name in starts[1:]:
            parts.append(OrderedDict())
        parts[-1][name] = child
    return [nn.Sequential(part) for part in parts]


def partition(parts: Sequence[nn.Sequential], k: int) -> list[nn.Sequential]:
    """Join neighbouring parts into k parts. The numbers of original parts in them differ by at most one.

    Raises:
        ValueError: There are fewer than k original parts, or k is less than 1.
    """
    if not 1 <= k <= len(parts):
        raise ValueError(
            f"a network of {len(parts)} parts cannot be split into {k}: take 1 to {len(parts)} devices"
        )
    bounds = [-(-i * len(parts) // k) for i in range(k + 1)]
    joined = [parts[bounds[i] : bounds[i + 1]] for i in range(k)]
    return [
        nn.Sequential(OrderedDict(child for part in row for child in part.named_children()))
        for row in joined
    ]


def part_inputs(parts: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the input of each part and the output of the last one for a batch like `x`, on the device "meta"."""
    inputs = [x.to("meta")]
    for part in parts:
        state = {name: value.to("meta") for name, value in part.state_dict().items()}
        inputs.append(torch.func.functional_call(part, state, inputs[-1]).detach())
    return inputs


class Pipeline:
    """The part of a network on this process. `step` computes its gradients of the mean cross-entropy of a batch.

    `part` is an ordinary module for an optimizer. Keep batch norm in eval mode: in training mode it would use the
    statistics of single micro-batches, unlike one device.

    Args:
        parts: The complete network from `partition`, one part for each process. All processes need the same list.
        x: An example batch. Only its shape and dtype are used, so it may be on the device "meta".
        schedule: A key of `SCHEDULES`.
        num_micro_batches: Number of equal parts of a batch. 1f1b needs at least one per process.
        device: The device of this process.
        group: The processes, in the order of the parts; None for all processes.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        x: Tensor,
        schedule: str,
        num_micro_batches: int,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        rank = dist.get_rank(group)
        k = dist.get_world_size(group)
        m = num_micro_batches
        if len(x) % m:
            raise ValueError(f"a batch of {len(x)} cannot be split evenly into {m} micro-batches")
        self.is_first = rank == 0
        self.is_last = rank == k - 1
        self.device = torch.device(device)
        self.group = group
        self.part = parts[rank].to(self.device)
        # With these shapes torch does not have to run the network to find them.
        part_input, part_output = part_inputs(parts, x[: len(x) // m])[rank : rank + 2]
        part_input.requires_grad_(not self.is_first)
        part_output.requires_grad_()
        stage = PipelineStage(
            self.part,
            stage_index=rank,
            num_stages=k,
            device=self.device,
            input_args=part_input,
            output_args=part_output,
            group=group,
        )
        self._schedule = SCHEDULES[schedule](
            stage, m, lambda *pair: F.cross_entropy(*pair) / m, scale_grads=False
        )

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Run a batch forward and backward, adding to the gradients of `part`.

        Args:
            x: Input (B, ...); needed on the first process only.
            y: Targets (B, ...); needed on the last process only.

        Returns:
            The mean loss over the batch on the last process, None on the others.
        """
        inputs = (x.to(self.device),) if self.is_first and x is not None else ()
        target = y.to(self.device) if self.is_last and y is not None else None
        losses: list[Tensor] = []
        self._schedule.step(*inputs, target=target, losses=losses if self.is_last else None)
        return torch.stack(losses).sum().detach() if self.is_last else None

    def full_state(self) -> dict[str, Tensor]:
        """Return the state dict of the complete network, on the CPU. Every process must call this."""
        own = {name: value.cpu() for name, value in self.part.state_dict().items()}
        states: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(states, own, group=self.group)
        return {name: value for state in states for name, value in state.items()}
