"""Fits of a small network, without the command line."""

import shutil
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from data_files import read

from finetune import Classifier, ImageFolderData
from finetune.training.calibration import Calibration

# One rate: a run of two epochs equals one of one epoch that is continued.
SMALL = {"backbone": "mobilenet_v3_small", "weights": None, "scheduler": None}


def data(root: Path, **options: Any) -> ImageFolderData:
    quick = {"image_size": 32, "batch_size": 12, "num_workers": 0, "augmentations": None}
    return read(ImageFolderData(str(root), **{**quick, **options}))


def fit(
    model: Classifier, data: ImageFolderData, ckpt_path: Path | None = None, **options: Any
) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False, **options},
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def scramble(path: Path) -> None:
    """Give the network in a checkpoint random weights that separate any two images."""
    known, generator = torch.load(path, weights_only=True), torch.Generator().manual_seed(0)
    for name, value in known["state_dict"].items():
        if name.startswith("network.") and value.dim() > 1:
            value.copy_(
                torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5
            )
    torch.save(known, path)


def write_checkpoints(folder: Path, colours: Path, backbone: str, image_size: int) -> Path:
    """Write plain.ckpt, and calibrated.ckpt with a temperature and with weights that separate any two images."""
    images = data(colours, resize="squash", image_size=image_size)
    torch.manual_seed(0)
    fit(Classifier(images.class_names, backbone, weights=None), images).save_checkpoint(
        folder / "plain.ckpt"
    )
    shutil.copy(folder / "plain.ckpt", folder / "calibrated.ckpt")
    scramble(folder / "calibrated.ckpt")
    known = torch.load(folder / "calibrated.ckpt", weights_only=True)
    calibration = Calibration("single", scale=(4.0,), bias=(0.0,), num_images=7)
    known["finetune"]["calibration"] = calibration.as_plain()
    torch.save(known, folder / "calibrated.ckpt")
    return folder
