"""Lightning's MLFlowLogger in the run's folder."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytorch_lightning as pl
from PIL import Image
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.run_logger import RunLogger
from finetune.system.messages import reason

log = logging.getLogger(__name__)
_ANSWERS = 10.0  # seconds in which a server does
# in a name: Lightning drops them, with a warning at each step
_NOT_ALLOWED = re.compile("[^a-zA-Z0-9_/. -]")
_LONGEST = 240  # letters of a name


class MLFlowLogger(RunLogger, pl.loggers.MLFlowLogger):
    """Writes what `mlflow ui` shows, into a folder or to a server.

    Args:
        experiment_name: The experiment that the run is one of.
        run_name: By default the run's folder.
        tracking_uri: A server's address, or another of MLflow's; by default `save_dir`, or what MLFLOW_TRACKING_URI
            says.
        save_dir: A folder; by default `mlflow` in the run's.
        tags: Of the run.
        prefix: What stands before each name.
        artifact_location: Where pictures go; by default as the tracking URI has it.
        run_id: A run of MLflow's to go on in.
    """

    package = place = "mlflow"
    _initialized = _is_set_up = False

    def __init__(
        self,
        experiment_name: str = "finetune",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        save_dir: str | None = None,
        tags: dict[str, Any] | None = None,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
    ) -> None:
        # Before mlflow is imported: it would take databases only, send what is used of it, and miss git on the screen.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        self.check_package()
        settings = {"experiment_name": experiment_name, "tags": tags, "prefix": prefix}
        self._settings: dict[str, Any] = {**settings, "artifact_location": artifact_location}
        self._given_name = run_name
        self._given_id = run_id
        self.goes_on = run_id is not None
        self._uri = tracking_uri or (None if save_dir else os.environ.get("MLFLOW_TRACKING_URI"))
        self._dir = save_dir
        self._names: dict[str, str] = {}  # of what is logged, and as MLflow has them

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._is_set_up:
            return super().experiment
        name, run_id = self._given_name or self._title(), self._take_up()
        uri = self._uri or Path(self._dir or self._run_folder()).absolute().as_uri()
        _check_server(uri)
        announcing = logging.getLogger("pytorch_lightning.loggers.mlflow")
        level = announcing.level
        announcing.setLevel(logging.ERROR)  # that there was no such experiment yet
        try:
            # Not before: it makes the folder.
            client = self._client(uri, name, self._given_id or run_id)
        finally:
            announcing.setLevel(level)
        self._is_set_up = True
        self._remember(str(self._run_id))
        return client

    def _client(self, uri: str, name: str, run_id: str | None) -> Any:
        pl.loggers.MLFlowLogger.__init__(
            self, tracking_uri=uri, run_name=name, run_id=run_id, **self._settings
        )
        try:
            return super().experiment
        except (
            Exception
        ) as error:  # a server's MlflowException, or of a folder nothing more special
            is_gone = getattr(
                error, "error_code", ""
            ) == "RESOURCE_DOES_NOT_EXIST" or "does not exist" in str(error)
            if run_id is None or self._given_id or not is_gone:
                raise
        log.warning(
            "MLFlowLogger: what was logged of this run before is no longer there: it begins anew"
        )
        self.goes_on = False
        return self._client(uri, name, None)

    @rank_zero_only
    def log_config(self, settings: Mapping[str, Any]) -> None:
        client = self.experiment
        if self.goes_on:  # MLflow takes each setting once
            client.update_run(self.run_id, "RUNNING")
        else:
            allowed = {self._allowed(name): value for name, value in settings.items()}
            pl.loggers.MLFlowLogger.log_hyperparams(self, allowed)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        _ = self.experiment  # of whose settings Lightning's takes the prefix
        super().log_metrics({self._allowed(name): value for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self.experiment.log_image(self.run_id, image, f"{name}.png")

    def _allowed(self, name: str) -> str:
        """Return a name as MLflow may have it: a class may be called anything, and no two metrics the same."""
        if name not in self._names:
            allowed = numbered = _NOT_ALLOWED.sub("_", name)[:_LONGEST]
            taken, num = set(self._names.values()), 1
            while numbered in taken:
                num += 1
                numbered = f"{allowed} {num}"
            self._names[name] = numbered
        return self._names[name]


def _check_server(uri: str) -> None:
    """Make sure that a server is there: MLflow would ask again and again, for minutes."""
    if uri.startswith(("http://", "https://")):
        try:
            urlopen(uri, timeout=_ANSWERS).close()
        except HTTPError:  # an answer
            return
        except OSError as error:
            told = "MLFLOW_TRACKING_URI or --trainer.logger.tracking_uri says where it is"
            raise ValueError(f"no server answers at {uri} ({reason(error)}): {told}") from error
