"""Ensembles: several networks of one architecture that were trained one by one, and predict together."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.settings.schema import LabelKind

# Shapes: M members, B images, K classes.


class Ensemble(nn.Module):
    """Averages the probabilities of its members, and returns the logits of the mean.

    Source: Lakshminarayanan et al. 2017 (arXiv:1612.01474), section 2.4.

    Args:
        members: Networks from normalized images (B, 3, h, w) to logits (B, K).
        label_kind: Whether a softmax or a sigmoid turns the logits into probabilities.
    """

    zero: Tensor

    def __init__(self, members: list[nn.Module], label_kind: LabelKind = "single") -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.label_kind = label_kind
        # Has the module's dtype, so that probabilities are averaged in float32 under autocast.
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits = torch.stack([member(x) for member in self.members]).to(self.zero.dtype)
        if self.label_kind == "several":
            return _mean_of_sigmoids(logits)
        return _mean(logits, len(self.members))


def _mean(logits: Tensor, num: int) -> Tensor:
    # only operations that torch.fx can trace
    return logits.log_softmax(2).logsumexp(0) - math.log(num)


def _mean_of_sigmoids(logits: Tensor) -> Tensor:
    """Return the log odds of the mean probability: of several labels each has its own."""
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)


def member_label(backbone: str, num: int) -> str:
    """Return the name of a network, preceded by the number of members of an ensemble."""
    return f"{num} × {backbone}" if num > 1 else backbone
