"""Metrics with sums in float64 as states, which are summed over ranks, saved in checkpoints and restored."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from finetune.training.precision import WITHOUT_FLOAT64


class PreciseSums(Metric):
    """A metric whose sums stay in float64, even if its module is converted to lower precision.

    On devices without float64, such as Apple's, the sums stay on the CPU.
    """

    full_state_update = False

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> nn.Module:
        @functools.wraps(fn)  # torchmetrics reads the function's name
        def moved(state: Tensor) -> Tensor:
            if state.dtype != torch.float64:
                return fn(state)
            if fn(torch.zeros(1)).device.type in WITHOUT_FLOAT64:
                return state.cpu()
            new = fn(state)
            return new if new.dtype == torch.float64 else state.to(new.device)

        return super()._apply(moved, exclude_state)


def global_sums(metric: Metric) -> dict[str, Tensor]:
    """Return the states of a metric, summed over all ranks. Every rank must call this at the same point."""
    with metric.sync_context():
        return {name: getattr(metric, name).detach().cpu().clone() for name in metric._defaults}  # noqa: SLF001 (torchmetrics names no states in public)


def restore_sums(metric: Metric, sums: dict[str, Tensor], is_rank_zero: bool) -> None:
    """Restore the result of `global_sums` on rank 0. The other ranks start at zero, so that the total is the same."""
    metric.reset()
    if is_rank_zero:
        for name, value in sums.items():
            setattr(metric, name, value.to(getattr(metric, name).device))
        metric._update_count = 1  # noqa: SLF001
