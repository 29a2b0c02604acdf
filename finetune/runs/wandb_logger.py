"""Lightning's WandbLogger in the run's folder: silent, and offline unless the user says otherwise."""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from PIL import Image
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.run_logger import RunLogger
from finetune.system.messages import WrongUsage

log = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")


class WandbLogger(RunLogger, pl.loggers.WandbLogger):
    """Writes what `wandb sync` sends to Weights & Biases, or sends it at once.

    Args:
        save_dir: Where wandb makes its folder `wandb`; by default in the run's.
        offline: Whether nothing is sent; by default so, unless WANDB_MODE says otherwise.
        project: By default what WANDB_PROJECT says, else finetune.
        name: By default the run's folder.
        id: By which Weights & Biases knows the run; by default a new one.
        prefix: What stands before each name.
        entity: The user or team to whom it is sent.
        group: The group that the run is one of.
        tags: Of the run.
        notes: On the run.
    """

    package = "wandb"

    def __init__(
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
        # Said to wandb.init itself: what was used in this process before has its own notion.
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
        del self._wandb_init["anonymous"]  # wandb would say that it has no effect

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None and not hasattr(self, "_attach_id"):
            self._experiment = self._begun()
        return super().experiment

    def _begun(self) -> Any:
        import wandb

        # Absolute: wandb's own process, which outlives a run, goes by the folder in which it was started.
        folder = os.path.abspath(self._save_dir or self._run_folder())
        Path(folder, "wandb").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=Path(folder, "wandb")):
            """Where it can't write wandb would take the temporary folder, in silence."""
        # its own logs, for one
        os.environ.setdefault("WANDB_CACHE_DIR", str(Path(folder, "wandb", "cache")))
        self._save_dir = self._wandb_init["dir"] = folder
        self._wandb_init["id"] = self._wandb_init["id"] or self._take_up()
        self._wandb_init["name"] = self._wandb_init["name"] or self._title()
        settings = wandb.Settings(silent=True, console="off")
        # A run of its own: Lightning would take the one that a notebook has open, and we would end it.
        begun: Any = wandb.init(**self._wandb_init, settings=settings, reinit="create_new")
        begun.define_metric("trainer/global_step")
        begun.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        self._remember(begun.id)
        if not self._offline and begun.url:
            log.info("logging to %s", begun.url)
        return begun

    @rank_zero_only
    def log_config(self, settings: Mapping[str, Any]) -> None:
        # each command writes a file of its own
        self.experiment.config.update(dict(settings), allow_val_change=True)

    @rank_zero_only
    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self.log_image(name, [image], step)

    @rank_zero_only
    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.finish()
            self._experiment = None
