"""TensorBoard, Weights & Biases and MLflow: they log into the run's folder, and send nothing unless the user asks."""

import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import urlopen

import pytorch_lightning as pl
import yaml
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.folder import Run, RunFolder
from finetune.runs.metrics_csv import is_defined
from finetune.runs.run_dir import RunDir
from finetune.system.messages import WrongUsage, install, only_errors, reason

log = logging.getLogger(__name__)

# Metrics whose last values TensorBoard's HPARAMS page shows next to the settings of a run.
_RESULTS = ("val/accuracy", "val/mAP", "val/loss", "test/accuracy", "test/mAP", "test/loss")
_WANDB_MODES = ("online", "offline", "disabled")
_TIMEOUT = 10.0  # seconds for a server to answer
# Characters that MLflow does not allow in names. Lightning would drop them, with a warning at each step.
_NOT_ALLOWED = re.compile("[^a-zA-Z0-9_/. -]")
_LONGEST = 240  # characters of a name in MLflow
# Read when the packages are imported: by default wandb and MLflow send reports, MLflow accepts only databases and
# complains without git.
_VARIABLES = MappingProxyType(
    {
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }
)


class _Started(Protocol):
    """A logger that has started."""

    id: str  # under which the library has the run

    def log_config(self, settings: Mapping[str, Any]) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None: ...

    def flush(self) -> None: ...

    def finish(self, status: str) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    """Lightning's TensorBoardLogger, with one file for the fit and its test.

    Lightning closes the file after the fit, and each later one is a new file. TensorBoard reads files in the order of
    their names, which end with a second and a number without leading zeros: the tenth file of a process was read before
    its ninth, and a resumed run showed the steps twice that it repeated.
    """

    id = "tensorboard"

    def __init__(self, run: RunDir, before: str | None, first_step: int | None) -> None:
        self._is_continued = before is not None
        self._logger = pl.loggers.TensorBoardLogger(
            run.path / "tensorboard",
            name="",
            version="",
            default_hp_metric=False,
            flush_secs=10,
            purge_step=first_step,
        )
        self._writer = self._logger.experiment

    def log_config(self, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        if not self._is_continued:
            for summary in hparams(dict(settings), dict.fromkeys(_RESULTS, 0.0)):
                self._writer._get_file_writer().add_summary(summary)  # noqa: SLF001

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        self._logger.log_metrics(dict(metrics), step)

    def flush(self) -> None:
        self._writer.flush()  # Lightning's `save` also writes a file of hyperparameters

    def finish(self, status: str) -> None:
        self.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of wandb with the names of Lightning's WandbLogger: silent, and offline by default."""

    def __init__(self, run: RunDir, before: str | None, first_step: int | None) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        if mode not in _WANDB_MODES:
            raise WrongUsage(f"WANDB_MODE is {mode!r}: it must be online, offline or disabled")
        # Absolute: wandb's own process outlives a run, and its working directory may be another.
        folder = run.path.absolute()
        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        # Fail if the folder is not writable: wandb would silently use the system's temporary folder.
        with tempfile.TemporaryFile(dir=folder / "wandb"):
            pass
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
        # Create a new wandb run: Lightning would take one that a notebook has open, and `close` would finish it.
        self._run: Any = wandb.init(
            dir=str(folder),
            mode=mode,  # explicitly: wandb may have been used in this process with another mode
            project=os.environ.get("WANDB_PROJECT", "finetune"),
            id=before,
            name=_title(run),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",
        )
        self._run.define_metric("trainer/global_step")
        self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        self.id = self._run.id
        if mode != "offline" and self._run.url:
            log.info("logging to %s", self._run.url)

    def log_config(self, settings: Mapping[str, Any]) -> None:
        # Each command updates the config: its own values replace earlier ones.
        self._run.config.update(dict(settings), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        self._run.log({**metrics, "trainer/global_step": step})

    def flush(self) -> None:
        """Do nothing: wandb's own process writes."""

    def finish(self, status: str) -> None:
        """Do nothing: `close` ends it, after the test of a fit."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """Lightning's MLFlowLogger, in the run's folder or at MLFLOW_TRACKING_URI."""

    def __init__(self, run: RunDir, before: str | None, first_step: int | None) -> None:
        folder = (run.path / "mlflow").absolute()
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri()
        self._title = _title(run)
        self._names: dict[str, str] = {}  # names of metrics and settings, and their names in MLflow
        self._is_continued = before is not None
        _check_server(self._uri)
        with only_errors("pytorch_lightning.loggers.mlflow"):  # not that the experiment is new
            self._start(before)

    def _start(self, run_id: str | None) -> None:
        self._logger = pl.loggers.MLFlowLogger(
            experiment_name="finetune", run_name=self._title, tracking_uri=self._uri, run_id=run_id
        )
        try:
            self._client = self._logger.experiment
        except Exception as error:  # a server raises MlflowException, a folder a plain Exception
            is_gone = getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"
            if run_id is None or not (is_gone or "does not exist" in str(error)):
                raise
            log.warning("mlflow: the earlier logs of this run no longer exist: it starts again")
            self._is_continued = False
            self._start(None)
        self.id = str(self._logger.run_id)

    def log_config(self, settings: Mapping[str, Any]) -> None:
        if self._is_continued:  # MLflow accepts each setting only once
            self._client.update_run(self.id, "RUNNING")
        else:
            self._logger.log_hyperparams({self._allowed(n): value for n, value in settings.items()})

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        self._logger.log_metrics({self._allowed(n): value for n, value in metrics.items()}, step)

    def flush(self) -> None:
        """Do nothing: each value is written at once."""

    def finish(self, status: str) -> None:
        self._logger.finalize(status)

    def close(self) -> None:
        """Do nothing: `finish` has ended it."""

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


# By the name in `--logger`, which is also that of the package and of the extra that installs it.
_KINDS: Mapping[str, Callable[[RunDir, str | None, int | None], _Started]] = MappingProxyType(
    {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow}
)


class RunLogger(Logger):
    """Logs a run by another library, and continues there on `--resume`.

    If the library cannot start, the command fails at its start. A later error is logged once, and from then on the
    logger does nothing, so that the run continues.

    Args:
        kind: Name of the logger: `tensorboard`, `wandb` or `mlflow`.
        run: The run.

    Raises:
        WrongUsage: The package is missing or broken.
    """

    name = version = None

    def __init__(self, kind: str, run: Run) -> None:
        super().__init__()
        self.kind = kind
        self._run = run
        self._first_step: int | None = None
        self._started: _Started | None = None
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        _check_package(kind)

    @rank_zero_only
    def start(self, settings: Mapping[str, Any]) -> None:
        """Start the library in the run's folder, and log the settings in config.yaml, by dotted names.

        Raises:
            ValueError: The library cannot start.
        """
        run = RunDir(self._run.choose())
        names = run.facts.loggers
        try:
            started = _KINDS[self.kind](run, names.get(self.kind), self._first_step)
            started.log_config(settings)
        except WrongUsage:
            raise
        except Exception as error:
            raise ValueError(f"--logger {self.kind}: {reason(error)}") from error
        run.update(loggers={**names, self.kind: started.id})
        self._started = started

    def rewind(self, global_step: int) -> None:
        """Drop the steps from `global_step` on, which a resumed run repeats, if the library can do that."""
        self._first_step = global_step

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        defined = {name: value for name, value in metrics.items() if is_defined(name, value)}
        self._try(lambda started: started.log_metrics(defined, step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `start` logs all settings."""

    @rank_zero_only
    def save(self) -> None:
        self._try(lambda started: started.flush())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._try(lambda started: started.finish(status))

    @rank_zero_only
    def close(self) -> None:
        """Close the logger at the end of the command."""
        self._try(lambda started: started.close())
        self._started = None

    def _try(self, act: Callable[[_Started], None]) -> None:
        """Act on the library, and leave it out after its first error."""
        if self._started is None:
            return
        try:
            act(self._started)
        except Exception as error:
            self._started = None
            log.warning("--logger %s: %s: it logs nothing more", self.kind, reason(error))


class LoggedConfig(pl.Callback):
    """Starts the loggers of the run, once, with the settings in config.yaml.

    Args:
        folder: The callback that writes config.yaml.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._is_done = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_done:  # it is called again for the test after a fit
            return
        for logger in run_loggers(trainer.loggers):
            logger.start(flatten(yaml.safe_load(self.folder.config)))
        self._is_done = True


def run_loggers(loggers: Sequence[Logger]) -> list[RunLogger]:
    """Return the loggers that are a `RunLogger`."""
    return [logger for logger in loggers if isinstance(logger, RunLogger)]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dict with dotted names. Values that are neither numbers nor text become JSON."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            table |= flatten(value, f"{prefix}{key}.")
        else:
            is_plain = isinstance(value, (bool, int, float, str))
            table[f"{prefix}{key}"] = value if is_plain else json.dumps(value, default=str)
    return table


def _title(run: RunDir) -> str:
    """Return the name of the run in lists of runs."""
    return "-".join(run.path.parts[-3:])  # some libraries take a slash for a folder


def _check_package(name: str) -> None:
    """Check that a package is installed.

    Raises:
        WrongUsage: It is missing or broken.
    """
    needed = install(name)
    spec = find_spec(name)
    # A spec without origin is a plain folder of that name, such as the ones that wandb writes.
    if spec is None or spec.origin is None:
        raise WrongUsage(f"--logger {name} needs {name}: {needed}")
    try:
        import_module(name)
    except Exception as error:  # for example, it was built for another version of a dependency
        message = f"--logger {name}: cannot import {name}: {reason(error)}"
        raise WrongUsage(f"{message}; in a fresh environment, {needed}") from error


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
