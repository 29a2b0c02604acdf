"""Lightning's TensorBoardLogger in the run's folder."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytorch_lightning as pl
from PIL import Image
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.run_logger import RunLogger

# What TensorBoard's page of hyperparameters shows beside a run's settings: the last that was logged of each.
_RESULTS = ("val/accuracy", "val/loss", "test/accuracy", "test/loss")


class TensorBoardLogger(RunLogger, pl.loggers.TensorBoardLogger):
    """Writes what `tensorboard --logdir` shows.

    Args:
        save_dir: Where; by default the folder `tensorboard` in the run's.
        name: Folder in a `save_dir` that is given.
        version: Folder in that; by default a new one for each run.
        prefix: What stands before each name.
        flush_secs: Seconds after which what was logged is written at the latest.
    """

    package = place = "tensorboard"

    def __init__(
        self,
        save_dir: str | None = None,
        name: str = "finetune",
        version: int | str | None = None,
        prefix: str = "",
        flush_secs: int = 10,
    ) -> None:
        self.check_package()
        self._is_placed = save_dir is not None
        super().__init__(
            save_dir or "",
            name,
            version,
            default_hp_metric=False,
            prefix=prefix,
            flush_secs=flush_secs,
        )

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            before = self._take_up()
            if not self._is_placed:
                self._root_dir = self._run_folder()
                self._name = ""
                self._version = ""
            elif before is not None:
                self._version = before
            elif not isinstance(self.version, str):  # `version` counts those that are there
                self._version = f"version_{self.version}"
            self._remember(str(self._version))
        return super().experiment

    @rank_zero_only
    def log_config(self, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        if not self.goes_on:
            for summary in hparams(dict(settings), dict.fromkeys(_RESULTS, 0.0)):
                self.experiment._get_file_writer().add_summary(summary)

    @rank_zero_only
    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self.experiment.add_image(name, np.asarray(image), step, dataformats="HWC")

    def rewind(self, global_step: int) -> None:
        self._kwargs["purge_step"] = global_step

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()  # Lightning's also writes hyperparameters into a file of their own

    @rank_zero_only
    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.close()
