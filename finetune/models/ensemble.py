"""Networks of one kind that answer together: each learns by itself from the same pictures, with a head of its own."""

import math

import torch
from torch import Tensor, nn

from finetune.system.messages import WrongUsage

MOST = 32  # members: an untrusted file may state their number

# Shapes: M members, B pictures, K classes.


class Ensemble(nn.Module):
    """Gives the mean of its members' probabilities, as logits: their logarithm. In training each answers for itself.

    Source: Lakshminarayanan et al. 2017 (arXiv:1612.01474), section 2.4.

    Args:
        members: From normalised pictures (B, 3, h, w) to logits (B, K) each.
    """

    zero: Tensor

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        # Follows the precision of the module, so that under autocast probabilities are averaged in float32.
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K), in training (M, B, K)."""
        logits = torch.stack([member(x) for member in self.members]).to(self.zero.dtype)
        return logits if self.training else _mean(logits, len(self.members))


def together(logits: Tensor) -> Tensor:
    """Return what members say as one, (B, K), from what each says, (M, B, K); what one network says as it is."""
    return logits if logits.ndim == 2 else _mean(logits, len(logits))


def _mean(logits: Tensor, num: int) -> Tensor:
    # nothing that torch.fx could not follow
    return logits.log_softmax(2).logsumexp(0) - math.log(num)


def check(num: int, head_init: str) -> None:
    """Make sure that there can be an ensemble of so many.

    Raises:
        WrongUsage: There can't.
    """
    if type(num) is not int or not 1 <= num <= MOST:
        raise WrongUsage(f"model.members must be a whole number from 1 to {MOST}, not {num!r}")
    if num > 1 and head_init not in ("auto", "xavier"):
        raise WrongUsage(
            f"model.members begin with other heads, which model.head_init {head_init} makes alike"
        )


def told(backbone: str, num: int) -> str:
    """Return what to say of a network, or of so many of its kind."""
    return f"{num} × {backbone}" if num > 1 else backbone
