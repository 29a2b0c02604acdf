"""The bytes that each device sends in one training step, for every kind of parallelism.

Inputs and targets are not counted, since they have to be sent in every case. A list has one entry for each device.
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from finetune.parity.branches import Siamese
from finetune.parity.pipeline import part_inputs

# Shapes: B samples in a batch, k devices.


def data_parallel_bytes(network: nn.Module, k: int) -> list[int]:
    """Return 2 (k - 1) / k of the bytes of all gradients: the volume of a ring all-reduce."""
    return [_ring_bytes(sum(p.nbytes for p in network.parameters() if p.requires_grad), k)] * k


def by_hand_bytes(network: nn.Module, k: int) -> list[int]:
    """Return the bytes that `data_parallel.allreduce` sends.

    Every other device sends all its gradients to the first one. The first device sends the sum to the k - 1 others.
    """
    gradients = sum(p.nbytes for p in network.parameters() if p.requires_grad)
    return [(k - 1) * gradients, *[gradients] * (k - 1)]


def pipeline_bytes(parts: Sequence[nn.Module], x: Tensor) -> list[int]:
    """Return the bytes of each part's output (B, ...), sent forward, plus those of its input's gradient, sent back.

    The first part sends nothing back, and the last one nothing forward. The number of micro-batches does not matter.

    Args:
        parts: The complete network, one part for each device.
        x: A batch. Only its shape and dtype are used.
    """
    inner = [0, *(activation.nbytes for activation in part_inputs(parts, x)[1:-1]), 0]
    return [inner[i] + inner[i + 1] for i in range(len(parts))]


def linear_bytes(network: nn.Module, names: Sequence[str], batch_size: int, k: int) -> list[int]:
    """Return the bytes that each device sends in a step with `shard_linear`.

    The outputs (B, out) of a row-wise layer are all-reduced round a ring. So is the gradient of the input (B, in) of a
    column-wise layer, if a parameter before the layer trains. If the last layer is column-wise, each device sends its
    part of the outputs, B x ceil(out / k) values, to the k - 1 others.
    """
    num_bytes = 0
    first = next(p for p in network.parameters() if p.requires_grad)
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
    """Return the bytes of the LSTM's gradients, plus those of its outputs (B, 64), which each device sends to the CPU.

    The second device sends its gradients to the first one, which sends back the sum.
    """
    gradients = sum(p.nbytes for p in network.lstm.parameters())
    return [
        gradients + batch_size * network.lstm.hidden_size * network.dense.weight.element_size()
    ] * 2


def _ring_bytes(num_bytes: int, k: int) -> int:
    """Return the bytes that each device sends in a ring all-reduce: 2 (k - 1) times one k-th of the data.

    Source: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (2009).
    """
    return 2 * (k - 1) * num_bytes // k
