"""Ensembles: several networks of one architecture. Each trains on the same images, with its own random head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.settings.schema import LabelKind

# Shapes: M members, B images, K classes.


class Ensemble(nn.Module):
    """Averages the probabilities of its members, and returns the logits of the mean.

    In training mode it returns the logits of each member.

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
        """Return logits (B, K); in training mode (M, B, K)."""
        logits = torch.stack([member(x) for member in self.members]).to(self.zero.dtype)
        if self.training:
            return logits
        if self.label_kind == "several":
            return _mean_of_sigmoids(logits)
        return _mean(logits, len(self.members))


def combine_logits(logits: Tensor, label_kind: LabelKind = "single") -> Tensor:
    """Return the logits (B, K) of an ensemble from those of its members (M, B, K). Logits (B, K) are returned as is."""
    if logits.ndim == 2:
        return logits
    return _mean_of_sigmoids(logits) if label_kind == "several" else _mean(logits, len(logits))


def _mean(logits: Tensor, num: int) -> Tensor:
    # only operations that torch.fx can trace
    return logits.log_softmax(2).logsumexp(0) - math.log(num)


def _mean_of_sigmoids(logits: Tensor) -> Tensor:
    """Return the log odds of the mean probability: of several labels each has its own."""
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)


def member_label(backbone: str, num: int) -> str:
    """Return the name of a network, preceded by the number of members of an ensemble."""
    return f"{num} × {backbone}" if num > 1 else backbone
