"""What a head takes and predicts, and its default initialization."""

from finetune.settings.schema import HeadInit

# The number with --freeze backbone; see benchmarks/NOTEBOOK.md, "The head of a frozen backbone".
SOLVED_STAGES = 3


def resolved_head_init(head_init: HeadInit, weights: str | None) -> HeadInit:
    """Return how the head starts, with `auto` resolved.

    With a random head, the first steps of training distort pretrained features. A head that is fitted on them first
    prevents this (arXiv:2202.10054). It does not help with random weights.

    Args:
        head_init: The value of the user or of a checkpoint.
        weights: The pretrained weights; None for random ones.
    """
    if head_init != "auto":
        return head_init
    return "probe" if weights is not None else "xavier"
