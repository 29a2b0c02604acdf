"""Batch norm fused into the convolutions before it, in networks that torch.fx can trace."""

from torch import nn


def fuse_batch_norm(part: nn.Module) -> nn.Module:
    """Return a copy with batch norm folded into the convolutions before it. It computes the same up to rounding.

    A module that torch.fx can't trace is returned itself.

    Args:
        part: A module in eval mode.
    """
    from torch.fx.experimental.optimization import fuse  # needed for evaluation only

    try:
        return fuse(part)
    except Exception:  # networks of timm raise errors of many types when they are traced
        return part
