"""Checks that probabilities are finite numbers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from finetune.system.messages import shown

# Shapes: B images of a batch, K classes.


class NotFinite(ValueError):
    """Probabilities of an image are not finite. NaN fails every comparison, so a predicted class would be arbitrary."""


def check_finite_rows(
    probabilities: Tensor, name_of: Callable[[int], object], source: object, precision: str
) -> None:
    """Check that all probabilities of a batch are finite.

    Args:
        probabilities: (B, K).
        name_of: Returns a name for the image in a row, such as its path.
        source: The checkpoint or exported file that computed them.
        precision: The precision of the computation.

    Raises:
        NotFinite: Some are not finite. The message names the checkpoint and the first such image.
    """
    is_finite = probabilities.isfinite().all(dim=1)
    if is_finite.all():
        return
    name = shown(name_of(int(is_finite.int().argmin())))
    others = int((~is_finite).sum()) - 1
    more = f" (and {others} more)" if others else ""
    hint = "" if precision in ("32-true", "64-true") else "try precision 32-true, or "
    raise NotFinite(
        f"cannot classify {name}{more}: {shown(source)} gives probabilities that are not finite numbers in precision "
        f"{precision}. Its weights may be damaged: {hint}take another checkpoint"
    )


def check_evaluated(probabilities: Tensor, indices: Tensor, trainer: Any) -> None:
    """Check in `validate`, `test` and `predict` that all probabilities of a batch are finite.

    In `fit` the loss is checked instead (`finetune.runs.model_checkpoint`).

    Args:
        probabilities: (B, K).
        indices: Index of each image in its split, (B,).
        trainer: The Trainer; its command and checkpoint are in the message.

    Raises:
        NotFinite: Some are not finite.
    """
    split = {"validate": "val", "test": "test", "predict": "predict"}.get(trainer.state.fn)
    if split is None:
        return

    def name_of(row: int) -> object:
        splits = getattr(trainer.datamodule, "splits", {})
        return (
            splits[split].paths[int(indices[row])]
            if split in splits
            else f"image {int(indices[row])}"
        )

    check_finite_rows(probabilities, name_of, trainer.ckpt_path or "the network", trainer.precision)
