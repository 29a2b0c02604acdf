"""Networks with batch norm fused into the convolutions before it, where torch.fx can follow their data flow."""

from torch import nn


def fuse_batch_norm(part: nn.Module) -> nn.Module:
    """Return a copy with batch norm folded into the convolutions before it.

    What it computes is the same up to rounding. A part that torch.fx can't follow comes back as it is.

    Args:
        part: In eval mode.
    """
    from torch.fx.experimental.optimization import fuse  # only what evaluates needs it

    try:
        return fuse(part)
    except Exception:  # whatever a network of timm's does with what it takes for pictures
        return part
