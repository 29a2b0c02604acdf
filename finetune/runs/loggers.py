"""TensorBoard, Weights & Biases and MLflow: they log into the run's folder, and send nothing unless the user asks."""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytorch_lightning as pl
import yaml
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.folder import Run, RunFolder
from finetune.runs.metrics_csv import is_defined
from finetune.runs.run_dir import RunDir
from finetune.system.messages import WrongUsage, install, only_errors, reason

log = logging.getLogger(__name__)

# Metrics whose last values TensorBoard's HPARAMS page shows next to the settings of a run.
_RESULTS = ("val/accuracy", "val/mAP", "val/loss", "test/accuracy", "test/mAP", "test/loss")
_TIMEOUT = 10.0  # seconds for a server to answer
_LONGEST = 240  # characters of a name in MLflow
_WANDB_MODES = ("online", "offline", "disabled")
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
_Settings = Mapping[str, Any]


# Each of the next functions starts Lightning's logger in the folder of a run, and logs the settings. `before` is the ID
# under which an earlier command has logged the run; None for a new one. A resumed run repeats the steps from
# `first_step` on.


def _tensorboard(
    run: RunDir, before: str | None, first_step: int | None, settings: _Settings
) -> Logger:
    from torch.utils.tensorboard.summary import hparams

    logger = TensorBoardLogger(
        run.path / "tensorboard",
        name="",
        version="",
        default_hp_metric=False,
        flush_secs=10,
        purge_step=first_step,
    )
    if before is None:
        # Lightning would also log the value 0 of each result.
        for summary in hparams(dict(settings), dict.fromkeys(_RESULTS, 0.0)):
            logger.experiment._get_file_writer().add_summary(summary)  # noqa: SLF001
    return logger


def _wandb(run: RunDir, before: str | None, first_step: int | None, settings: _Settings) -> Logger:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    if mode not in _WANDB_MODES:
        raise WrongUsage(f"WANDB_MODE is {mode!r}: it must be online, offline or disabled")
    # Absolute: wandb's own process outlives a run, and its working directory may be another.
    folder = run.path.absolute()
    # This fails if a file has the name: wandb would silently use the system's temporary folder.
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
    # Create a new wandb run: Lightning would take one that a notebook has open, and `close` would finish it.
    experiment: Any = wandb.init(
        dir=str(folder),
        mode=mode,  # explicitly: wandb may have been used in this process with another mode
        project=os.environ.get("WANDB_PROJECT", "finetune"),
        id=before,
        name=_title(run),
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
        reinit="create_new",
    )
    experiment.define_metric("trainer/global_step")
    experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    if mode != "offline" and experiment.url:
        log.info("logging to %s", experiment.url)
    logger = WandbLogger(experiment=experiment)
    logger.log_hyperparams(dict(settings))
    return logger


def _mlflow(run: RunDir, before: str | None, first_step: int | None, settings: _Settings) -> Logger:
    uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.path / "mlflow").absolute().as_uri()
    _check_server(uri)
    logger = MLFlowLogger("finetune", run_name=_title(run), tracking_uri=uri, run_id=before)
    with only_errors("pytorch_lightning.loggers.mlflow"):  # not that the experiment is new
        client = logger.experiment
    if before is None:
        logger.log_hyperparams({_allowed(name): value for name, value in settings.items()})
    else:  # MLflow accepts each setting only once
        client.update_run(before, "RUNNING")
    return logger


# By the name in `--logger`, which is also that of the package and of the extra that installs it.
_KINDS: Mapping[str, Callable[[RunDir, str | None, int | None, _Settings], Logger]] = (
    MappingProxyType({"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow})
)


class RunLogger(Logger):
    """Logs a run by one of Lightning's loggers, and continues there on `--resume`.

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
        self._logger: Any = None
        self._status = "failed"
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        _check_package(kind)

    @rank_zero_only
    def start(self, settings: _Settings) -> None:
        """Start the library in the run's folder, and log the settings in config.yaml, by dotted names.

        Raises:
            ValueError: The library cannot start.
        """
        run = RunDir(self._run.choose())
        names = run.facts.loggers
        try:
            logger = _KINDS[self.kind](run, names.get(self.kind), self._first_step, settings)
        except WrongUsage:
            raise
        except Exception as error:
            raise ValueError(f"--logger {self.kind}: {reason(error)}") from error
        run.update(loggers={**names, self.kind: str(logger.version or self.kind)})
        self._logger = logger

    def rewind(self, global_step: int) -> None:
        """Drop the steps from `global_step` on, which a resumed run repeats, if the library can do that."""
        self._first_step = global_step

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        defined = {name: value for name, value in metrics.items() if is_defined(name, value)}
        if self.kind == "mlflow":
            defined = {_allowed(name): value for name, value in defined.items()}
        self._try(lambda logger: logger.log_metrics(defined, step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `start` logs all settings."""

    @rank_zero_only
    def save(self) -> None:
        if self.kind == "tensorboard":  # the others write at once, or in a process of their own
            self._try(lambda logger: logger.experiment.flush())

    def finalize(self, status: str) -> None:
        """Keep how the fit or its test has ended until `close`.

        Lightning's TensorBoardLogger would close its file after the fit, and open another one for the test. TensorBoard
        reads the files of a folder in the order of their names, which is not always that of their times.
        """
        self._status = status

    @rank_zero_only
    def close(self) -> None:
        """Close the logger at the end of the command."""
        if self.kind == "tensorboard":  # `finalize` would also write a file of hyperparameters
            self._try(lambda logger: logger.experiment.close())
        else:
            self._try(lambda logger: logger.finalize(self._status))
        if self.kind == "wandb":  # which Lightning leaves open
            self._try(lambda logger: logger.experiment.finish())
        self._logger = None

    def _try(self, act: Callable[[Any], None]) -> None:
        """Act on Lightning's logger, and leave it out after its first error."""
        if self._logger is None:
            return
        try:
            act(self._logger)
        except Exception as error:
            self._logger = None
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


def _allowed(name: str) -> str:
    """Return a name that MLflow allows, with the codes of other characters; the name of a class may have any."""
    return re.sub("[^a-zA-Z0-9_/. -]", lambda char: f"_{ord(char[0]):x}_", name)[:_LONGEST]


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
