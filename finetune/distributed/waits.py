"""End a run in which a rank neither works nor ends."""

from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist

from finetune import lightning_private
from finetune.distributed.ranks import kill_children

LONGEST_WAIT = timedelta(minutes=10)  # for another rank, in training and evaluation


class LimitWaits(pl.Callback):
    """Ends a run in which a rank neither works nor ends: a machine without power, a suspended process.

    The other ranks then get an error from the collective in which they wait. Outside of training and evaluation they
    wait for the timeout of the strategy, 30 minutes, since rank 0 may download weights or fit a head. A timeout that
    the user has set for the strategy is kept.
    """

    def _limit(self, trainer: pl.Trainer, *_: Any) -> None:
        _set_timeout(trainer, LONGEST_WAIT)

    def _restore(self, trainer: pl.Trainer, *_: Any) -> None:
        _set_timeout(trainer, dist.default_pg_timeout)

    on_train_start = on_validation_start = on_test_start = _limit  # type: ignore[assignment]
    on_train_end = on_test_end = _restore  # type: ignore[assignment]

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Kill the other ranks, which Lightning has started, since a suspended one would not end."""
        if "Timed out waiting" in str(exception):
            kill_children()


def _set_timeout(trainer: pl.Trainer, timeout: timedelta) -> None:
    own = lightning_private.process_group_timeout(trainer.strategy)
    is_default = own is None or own == dist.default_pg_timeout
    if trainer.world_size > 1 and is_default:
        # torch has no public function for this before 2.15.
        group: Any = dist.group.WORLD
        group._get_backend(trainer.strategy.root_device)._set_default_timeout(timeout)  # noqa: SLF001
