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
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.run_logger import RunLogger
from finetune.system.messages import only_errors, reason

log = logging.getLogger(__name__)
_TIMEOUT = 10.0  # seconds for a server to answer
# Characters that MLflow does not allow in names. Lightning would drop them, with a warning at each step.
_NOT_ALLOWED = re.compile("[^a-zA-Z0-9_/. -]")
_LONGEST = 240  # characters of a name


class MLFlowLogger(RunLogger, pl.loggers.MLFlowLogger):
    """Logs to MLflow, into a folder or to a server. `mlflow ui` shows the logs.

    Args:
        experiment_name: Name of the experiment.
        run_name: Name of the run; by default the run's folder.
        tracking_uri: Address of a server, or another tracking URI; by default `save_dir`, else MLFLOW_TRACKING_URI.
        save_dir: A folder; by default `mlflow` in the run's folder.
        tags: Tags of the run.
        prefix: Prefix of the names of metrics.
        artifact_location: Where images are stored; by default the tracking URI decides.
        run_id: ID of an MLflow run to continue.
    """

    package = place = "mlflow"
    _initialized = (
        False  # Lightning's, which reads it at the end of a run even if nothing was logged
    )
    _is_set_up = False

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
        # Before mlflow is imported. By default it accepts only databases, sends telemetry, and complains without git.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        self.check_package()
        settings = {"experiment_name": experiment_name, "tags": tags, "prefix": prefix}
        self._settings: dict[str, Any] = {**settings, "artifact_location": artifact_location}
        self._requested_name = run_name
        self._requested_id = run_id
        self.is_continued = run_id is not None
        self._uri = tracking_uri or (None if save_dir else os.environ.get("MLFLOW_TRACKING_URI"))
        self._dir = save_dir
        self._names: dict[str, str] = {}  # names of metrics and settings, and their names in MLflow

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._is_set_up:
            return super().experiment
        name = self._requested_name or self._title()
        run_id = self._earlier_name()
        uri = self._uri or Path(self._dir or self._run_folder()).absolute().as_uri()
        _check_server(uri)
        with only_errors(
            "pytorch_lightning.loggers.mlflow"
        ):  # no message that the experiment is new
            # This creates the folder, so it comes late.
            client = self._client(uri, name, self._requested_id or run_id)
        self._is_set_up = True
        self._remember(str(self._run_id))
        return client

    def _client(self, uri: str, name: str, run_id: str | None) -> Any:
        pl.loggers.MLFlowLogger.__init__(
            self, tracking_uri=uri, run_name=name, run_id=run_id, **self._settings
        )
        try:
            return super().experiment
        except Exception as error:  # a server raises MlflowException, a folder a plain Exception
            is_gone = getattr(
                error, "error_code", ""
            ) == "RESOURCE_DOES_NOT_EXIST" or "does not exist" in str(error)
            if run_id is None or self._requested_id or not is_gone:
                raise
        log.warning("MLFlowLogger: the earlier logs of this run no longer exist: it starts again")
        self.is_continued = False
        return self._client(uri, name, None)

    @rank_zero_only
    def log_config(self, settings: Mapping[str, Any]) -> None:
        client = self.experiment
        if self.is_continued:  # MLflow accepts each setting only once
            client.update_run(self.run_id, "RUNNING")
        else:
            allowed = {self._allowed(name): value for name, value in settings.items()}
            pl.loggers.MLFlowLogger.log_hyperparams(self, allowed)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        _ = self.experiment  # its creation sets the prefix that Lightning's `log_metrics` uses
        super().log_metrics({self._allowed(name): value for name, value in metrics.items()}, step)

    def _allowed(self, name: str) -> str:
        """Return a unique name that MLflow allows. The name of a class may have any characters."""
        if name not in self._names:
            allowed = numbered = _NOT_ALLOWED.sub("_", name)[:_LONGEST]
            taken = set(self._names.values())
            num = 1
            while numbered in taken:
                num += 1
                numbered = f"{allowed} {num}"
            self._names[name] = numbered
        return self._names[name]


def _check_server(uri: str) -> None:
    """Check that a server answers, since MLflow would retry for minutes.

    Raises:
        ValueError: It does not.
    """
    if uri.startswith(("http://", "https://")):
        try:
            urlopen(uri, timeout=_TIMEOUT).close()
        except HTTPError:  # an error response is an answer too
            return
        except OSError as error:
            hint = "MLFLOW_TRACKING_URI sets its address"
            raise ValueError(f"no server answers at {uri} ({reason(error)}): {hint}") from error
