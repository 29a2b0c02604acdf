"""A Siamese network with one device per branch. It computes the same as one device, up to rounding.

On CUDA both branches run at the same time, since kernels are launched asynchronously.
"""

import copy
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.parity.data_parallel import allreduce


class Siamese(nn.Module):
    """One LSTM reads two sequences (2, B, 140, 256). Its last outputs are concatenated and give a logit (B,).

    Source: Keras's FAQ on device parallelism, and the shared layers in its guide to the functional API. That network
    ends in a sigmoid, which is part of the loss here. torch's LSTM has two biases, which are added; Keras's has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 64, batch_first=True)
        self.dense = nn.Linear(2 * 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(
            torch.cat([_last_output(self.lstm, branch) for branch in x], dim=1)
        ).squeeze(1)


class Branches(nn.Module):
    """A `Siamese` on two devices. Each has a copy of the LSTM for one sequence. The last layer is on the CPU."""

    def __init__(self, network: Siamese, devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        # Without a copy, two branches on one device would share their weights, and the comparison would prove nothing.
        self.copies = nn.ModuleList(copy.deepcopy(network.lstm).to(device) for device in devices)
        self.dense = copy.deepcopy(network.dense).cpu()

    def forward(self, x: Tensor) -> Tensor:
        outputs = [
            _last_output(cast(nn.LSTM, lstm), branch)
            for lstm, branch in zip(self.copies, x, strict=True)
        ]
        return self.dense(torch.cat([output.cpu() for output in outputs], dim=1)).squeeze(1)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Run a batch (2, B, 140, 256) with targets (B,) in [0, 1] forward and backward; return its mean loss.

        Both copies get the sum of their gradients, so that they stay the same. Gradients must be zero or None before.
        """
        loss = F.binary_cross_entropy_with_logits(self(x), y)
        loss.backward()
        for replicas in zip(*(lstm.parameters() for lstm in self.copies), strict=True):
            allreduce([cast(Tensor, p.grad) for p in replicas])
        return loss.detach()

    def full_state(self) -> dict[str, Tensor]:
        """Return a copy of the state dict of the equivalent `Siamese`, on the CPU."""
        siamese = nn.ModuleDict({"lstm": self.copies[0], "dense": self.dense})
        return {name: value.to("cpu", copy=True) for name, value in siamese.state_dict().items()}


def _last_output(lstm: nn.LSTM, x: Tensor) -> Tensor:
    _, (output, _) = lstm(x.to(next(lstm.parameters()).device))
    return output[-1]  # (B, 64)
