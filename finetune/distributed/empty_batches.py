"""Steps in which a rank has no images: it still takes part in every collective, so that no other rank waits."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from finetune import lightning_private


def disable_buffer_broadcast(trainer: pl.Trainer) -> None:
    """Keep DDP from broadcasting buffers.

    DDP would also broadcast them in the first evaluation batch. A rank without images has no such batch.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        lightning_private.disable_buffer_broadcast(trainer.strategy)


def zero_loss(module: nn.Module) -> Tensor:
    """Return the loss of an empty batch: zero, with a zero gradient for every parameter, which DDP waits for."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = torch.stack([(parameter * 0).sum() for parameter in trained]).sum()
    # the dtype of the losses of the other ranks
    return total.to(torch.promote_types(total.dtype, torch.float32))
