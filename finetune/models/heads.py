"""What a head takes and predicts, and its default initialization."""

from finetune.settings.schema import HeadInit

# The number with --freeze backbone; see benchmarks/NOTEBOOK.md, "The head of a frozen backbone".
SOLVED_STAGES = 3


def resolved_head_init(head_init: HeadInit, weights: str | None, members: int) -> HeadInit:
    """Return how the head starts, with `auto` resolved.

    With a random head, the first steps of training distort pretrained features. A head that is fitted on them first
    prevents this (arXiv:2202.10054). It does not help with random weights. The members of an ensemble need random
    heads, since they differ by nothing else.

    Args:
        head_init: The value of the user or of a checkpoint.
        weights: The pretrained weights; None for random ones.
        members: Number of networks of an ensemble; 1 for a single network.
    """
    if head_init != "auto":
        return head_init
    return "probe" if weights is not None and members == 1 else "xavier"
