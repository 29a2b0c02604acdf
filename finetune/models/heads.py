"""How the head of a new fit starts, where nobody chose it."""

from typing import Literal

HeadInit = Literal["auto", "xavier", "source", "probe"]


def resolved_head_init(head_init: HeadInit, weights: str | None, members: int) -> HeadInit:
    """Return how the head starts, with `auto` resolved.

    Pretrained features are worth most as they are: a head that is fitted on them first keeps training from destroying
    them (arXiv:2202.10054). Features of random weights are not worth fitting a head on, and the members of an
    ensemble differ by their random heads.

    Args:
        head_init: As the user or a checkpoint gives it.
        weights: The pretrained weights; None for random ones.
        members: Number of networks that train together.
    """
    if head_init != "auto":
        return head_init
    return "probe" if weights is not None and members == 1 else "xavier"
