"""What a rank does in a step for which it has no images, so that the others do not wait for it."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from finetune import lightning_private


def own_buffers(trainer: pl.Trainer) -> None:
    """Let each rank have its own buffers.

    DDP would broadcast them in the first evaluation batch too, which a rank without images never has.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        lightning_private.disable_buffer_broadcast(trainer.strategy)


def zero_loss(module: nn.Module) -> Tensor:
    """Return the loss of no image: a zero that reaches every parameter, since DDP waits for each gradient."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = torch.stack([(parameter * 0).sum() for parameter in trained]).sum()
    # as the losses that other ranks add to it
    return total.to(torch.promote_types(total.dtype, torch.float32))
