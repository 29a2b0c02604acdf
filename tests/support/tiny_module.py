"""A module that trains nothing, and its Trainer: for callbacks."""

from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from finetune.training.calibration import Calibration
from finetune.training.task import Task

# Lightning's advice about what is meant here.
QUIET = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step` but have no `val_dataloader`"
    ),
]


class Tiny(pl.LightningModule):
    """Logs the numbers that the bar shows, known beforehand."""

    class_names = ("a", "b")
    counts: ClassVar[dict[str, Any]] = {"confusion_matrix": ((3, 1), (0, 4))}
    calibration = Calibration.unfitted("single", 2)
    coverage = None
    task = Task("single", ("a", "b"))

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.log("train/loss", 0.125)
        # several members' loss, say
        return self.layer(batch["label"].float()[:, None]).mean() * 0 + 0.5

    def on_train_epoch_end(self):
        self.log("train/loss_epoch", 0.5 + self.current_epoch)

    def validation_step(self, batch, batch_idx):
        self.log_dict(
            {"val/loss": 0.25, "val/accuracy": 0.75, "val/f1": 0.7, "val/calibration_error": 0.1}
        )

    def test_step(self, batch, batch_idx):
        self.log_dict(
            {
                "test/loss": 0.2,
                "test/accuracy": 0.9375,
                "test/f1": 0.9,
                "test/calibration_error": 0.05,
            }
        )

    def predict_step(self, batch, batch_idx):
        return batch["label"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader() -> DataLoader:
    return DataLoader([{"label": i} for i in range(12)], batch_size=4)


def trainer(tmp_path, *callbacks: pl.Callback, max_epochs: int = 2, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        **options,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        enable_progress_bar=False,
    )
