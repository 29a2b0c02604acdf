"""The scenarios of test_image_cache.py in several processes: `python cache_scenarios.py OUT DATA WORLD_SIZE`.

Each process prints `uncached` after a setup with a full disk and `cached` after a fit, and the messages of the cache.
"""

import errno
import logging
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.trainer.states import TrainerFn

from finetune import ImageFolderData
from finetune.data import image_cache


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return self.layer(batch["image"].float().mean(dim=(1, 2, 3))[:, None]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def slowly(function: Any) -> Any:
    def wrapped(*args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return function(*args, **options)

    return wrapped


def full_disk(*_: Any) -> None:
    time.sleep(1)
    raise OSError(errno.ENOSPC, "No space left on device")


def report(data: ImageFolderData) -> None:
    caches = [data.splits[split].cached for split in ("train", "val")]
    print("uncached" if None in caches else "cached")


def main(out: Path, root: str, world_size: int) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("finetune").setLevel(logging.INFO)
    image_cache._MIN_SAVED = 0
    image_cache.decode = slowly(image_cache.decode)  # so that they meet
    data = ImageFolderData(root, image_size=24, batch_size=16, num_workers=0, on_bad_image="skip")
    data.trainer = trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    dist.init_process_group("gloo")
    with patch.object(image_cache, "write_memmap", full_disk):
        dist.barrier()
        trainer.state.fn = TrainerFn.FITTING
        data.setup("fit")
    report(data)
    dist.barrier()
    model = Tiny()
    trainer.fit(model, datamodule=data)
    torch.save(model.state_dict(), out / f"{trainer.global_rank}.pt")
    report(data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
