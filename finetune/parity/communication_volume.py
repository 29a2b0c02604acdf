"""The bytes that each device sends in one step of training, for every way of using several.

Input and targets are left out: every way needs them somewhere. A list has one entry for each device.
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from finetune.parity.branches import Siamese
from finetune.parity.pipeline import part_inputs

# Shapes: B samples in a batch, k devices.


def data_parallel_bytes(network: nn.Module, k: int) -> list[int]:
    """Return 2 (k - 1) / k of the bytes of all gradients, which are summed round a ring of devices."""
    return [_ring_bytes(sum(p.nbytes for p in network.parameters() if p.requires_grad), k)] * k


def by_hand_bytes(network: nn.Module, k: int) -> list[int]:
    """Return the bytes of all gradients for every device, sent to the first, and k - 1 times these for the first, which
    sends the sum to each of the others: `data_parallel.allreduce`."""
    gradients = sum(p.nbytes for p in network.parameters() if p.requires_grad)
    return [(k - 1) * gradients, *[gradients] * (k - 1)]


def pipeline_bytes(parts: Sequence[nn.Module], x: Tensor) -> list[int]:
    """Return the bytes of a part's output (B, ...), sent on, and of the gradient of its input, sent back.

    The first part sends nothing back and the last nothing on. The number of micro-batches does not matter.

    Args:
        parts: The whole network, a part for each device.
        x: A batch; only its shape and dtype count.
    """
    inner = [0, *(activation.nbytes for activation in part_inputs(parts, x)[1:-1]), 0]
    return [inner[i] + inner[i + 1] for i in range(len(parts))]


def linear_bytes(network: nn.Module, names: Sequence[str], batch_size: int, k: int) -> list[int]:
    """Return what `shard_linear` makes each device send.

    A row-wise layer's outputs (B, out) are summed round a ring. So is the gradient of a column-wise layer's input
    (B, in), where anything before the layer learns. If the last layer is column-wise, each device sends its part of the
    outputs, B x ceil(out / k) values, to the k - 1 others.
    """
    num_bytes, first = 0, next(p for p in network.parameters() if p.requires_grad)
    for i, name in enumerate(names):
        layer = cast(nn.Linear, network.get_submodule(name))
        column = batch_size * layer.weight.element_size()
        if i % 2:
            num_bytes += _ring_bytes(column * layer.out_features, k)
            continue
        if layer.weight is not first:
            num_bytes += _ring_bytes(column * layer.in_features, k)
        if name == names[-1]:
            num_bytes += (k - 1) * column * -(-layer.out_features // k)
    return [num_bytes] * k


def branches_bytes(network: Siamese, batch_size: int) -> list[int]:
    """Return the bytes of the LSTM's gradients and of its outputs (B, 64), which go to the CPU.

    The second device sends its gradients to the first, which sends back the sum.
    """
    gradients = sum(p.nbytes for p in network.lstm.parameters())
    return [
        gradients + batch_size * network.lstm.hidden_size * network.dense.weight.element_size()
    ] * 2


def _ring_bytes(num_bytes: int, k: int) -> int:
    """Partial sums of a k-th each go round, then the sums: k - 1 sends, twice.

    Source: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (2009).
    """
    return 2 * (k - 1) * num_bytes // k
