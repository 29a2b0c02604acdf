"""Lightning's TensorBoardLogger in the run's folder."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.run_logger import RunLogger

# Metrics whose last values TensorBoard's HPARAMS page shows next to the settings of a run.
_RESULTS = ("val/accuracy", "val/mAP", "val/loss", "test/accuracy", "test/mAP", "test/loss")


class TensorBoardLogger(RunLogger, pl.loggers.TensorBoardLogger):
    """Logs to TensorBoard. `tensorboard --logdir` shows the logs.

    Args:
        save_dir: Folder of the logs; by default `tensorboard` in the run's folder.
        name: Folder in `save_dir`. It has no effect without `save_dir`.
        version: Folder in `name`; by default a new one for each run. It has no effect without `save_dir`.
        prefix: Prefix of the names of metrics.
        flush_secs: Seconds after which logged values are written at the latest.
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
        self._has_save_dir = save_dir is not None
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
            before = self._earlier_name()
            if not self._has_save_dir:
                self._root_dir = self._run_folder()
                self._name = ""
                self._version = ""
            elif before is not None:
                self._version = before
            elif not isinstance(self.version, str):  # `version` is the next free number
                self._version = f"version_{self.version}"
            self._remember(str(self._version))
        return super().experiment

    @rank_zero_only
    def log_config(self, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        if not self.is_continued:
            for summary in hparams(dict(settings), dict.fromkeys(_RESULTS, 0.0)):
                self.experiment._get_file_writer().add_summary(summary)  # noqa: SLF001

    def rewind(self, global_step: int) -> None:
        self._kwargs["purge_step"] = global_step

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()  # Lightning's `save` also writes a file of hyperparameters

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what was logged, and keep the file open for the test after the fit.

        Lightning's version closes the file, and each later one is a new file. TensorBoard reads files in the order of
        their names, which end with a second and a number without leading zeros: the tenth file of a process was read
        before its ninth, and a resumed run showed the steps twice that it repeated.
        """
        if self._experiment is not None:
            self.save()

    @rank_zero_only
    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.close()
