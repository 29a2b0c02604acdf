"""Folders of images that tests of several parts read, and a Trainer of each device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment

from finetune.data.datamodule import ImageDataModule


@pytest.fixture(scope="session")
def few(colours, tmp_path_factory) -> Path:
    """Eight images of each class, two of them damaged."""
    root = tmp_path_factory.mktemp("few")
    for name in ("blue", "red"):
        (root / "train" / name).mkdir(parents=True)
        for path in sorted((colours / "train" / name).iterdir())[:8]:
            (root / "train" / name / path.name).write_bytes(path.read_bytes())
        (root / "train" / name / "03.png").write_bytes(b"\x89PNG")
    return root


class OneOf(LightningEnvironment):
    """One of several processes, which nobody has started."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return self.rank

    def global_rank(self) -> int:
        return self.rank

    def set_global_rank(self, rank: int) -> None:
        """Leave the rank of this process, which other tests ask for, as it is."""


@pytest.fixture
def on_device() -> Callable[..., ImageDataModule]:
    """Gives a data module the Trainer of device `rank` of `world_size`, at the start of a run."""

    def attach(data: ImageDataModule, rank: int = 0, world_size: int = 1, **options):
        data.trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy="ddp",
            plugins=[OneOf(rank)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            **options,
        )
        assert (data.trainer.global_rank, data.trainer.world_size) == (rank, world_size)
        return data

    return attach
