"""Lightning's WandbLogger in the run's folder: silent, and offline by default."""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.run_logger import RunLogger
from finetune.system.messages import WrongUsage

log = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")


class WandbLogger(RunLogger, pl.loggers.WandbLogger):
    """Logs to Weights & Biases, offline by default. `wandb sync` uploads the logs.

    Args:
        save_dir: Folder in which wandb creates its folder `wandb`; by default the run's folder.
        offline: Whether nothing is sent; by default WANDB_MODE, or true if it is not set.
        project: Name of the project; by default WANDB_PROJECT, else finetune.
        name: Name of the run; by default the run's folder.
        id: ID of the run; by default a new one.
        prefix: Prefix of the names of metrics.
        entity: The user or team that owns the project.
        group: The group of the run.
        tags: Tags of the run.
        notes: Notes on the run.
    """

    package = "wandb"

    def __init__(  # noqa: PLR0913 (an argument for each option)
        self,
        save_dir: str | None = None,
        offline: bool | None = None,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
        prefix: str = "",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        self.check_package()
        # Passed to wandb.init explicitly: wandb may have been used in this process with another mode.
        mode = (
            os.environ.get("WANDB_MODE", "offline")
            if offline is None
            else "offline"
            if offline
            else "online"
        )
        if mode not in _MODES:
            raise WrongUsage(f"WANDB_MODE is {mode!r}: it must be online, offline or disabled")
        offline = mode in ("offline", "dryrun")
        project = project or os.environ.get("WANDB_PROJECT", "finetune")
        others: dict[str, Any] = {
            "entity": entity,
            "group": group,
            "tags": tags,
            "notes": notes,
            "mode": mode,
        }
        super().__init__(
            name, save_dir or "", offline=offline, id=id, project=project, prefix=prefix, **others
        )
        del self._wandb_init["anonymous"]  # wandb would warn that it has no effect

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None and not hasattr(self, "_attach_id"):
            self._experiment = self._start()
        return super().experiment

    def _start(self) -> Any:
        import wandb

        # Absolute: wandb's own process outlives a run, and its working directory may be another.
        folder = os.path.abspath(self._save_dir or self._run_folder())
        Path(folder, "wandb").mkdir(parents=True, exist_ok=True)
        # Fail if the folder is not writable: wandb would silently use the system's temporary folder.
        with tempfile.TemporaryFile(dir=Path(folder, "wandb")):
            pass
        # wandb writes its own logs there, for example.
        os.environ.setdefault("WANDB_CACHE_DIR", str(Path(folder, "wandb", "cache")))
        self._save_dir = self._wandb_init["dir"] = folder
        self._wandb_init["id"] = self._wandb_init["id"] or self._earlier_name()
        self._wandb_init["name"] = self._wandb_init["name"] or self._title()
        settings = wandb.Settings(silent=True, console="off")
        # Create a new wandb run: Lightning would take one that a notebook has open, and `close` would finish it.
        wandb_run: Any = wandb.init(**self._wandb_init, settings=settings, reinit="create_new")
        wandb_run.define_metric("trainer/global_step")
        wandb_run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        self._remember(wandb_run.id)
        if not self._offline and wandb_run.url:
            log.info("logging to %s", wandb_run.url)
        return wandb_run

    @rank_zero_only
    def log_config(self, settings: Mapping[str, Any]) -> None:
        # Each command updates the config: its own values replace earlier ones.
        self.experiment.config.update(dict(settings), allow_val_change=True)

    @rank_zero_only
    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.finish()
            self._experiment = None
