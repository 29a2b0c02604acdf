"""The base class of our versions of Lightning's loggers: they log into the run's folder, and log config and images."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from pytorch_lightning.loggers.logger import Logger

from finetune.runs.folder import Run, RunFolder
from finetune.runs.metrics_csv import is_defined
from finetune.runs.run_dir import RunDir
from finetune.system.messages import WrongUsage, install, reason

# Methods that are called after a run has started.
_LATER = ("log_metrics", "save", "finalize", "close")
log = logging.getLogger(__name__)


def _as_value_error(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that raises any error of a library as a ValueError with the name of the logger."""

    @wraps(begin)
    def method(self: "RunLogger", *args: Any) -> Any:
        try:
            return begin(self, *args)
        except WrongUsage:
            raise
        except Exception as error:
            name = type(self).__name__
            text = reason(error)
            raise ValueError(text if text.startswith(name) else f"{name}: {text}") from error

    return method


def _disable_on_error(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that logs its first error and does nothing from then on, so that the run continues."""

    @wraps(act)
    def method(self: "RunLogger", *args: Any, **options: Any) -> Any:
        if not self.has_failed:
            try:
                return act(self, *args, **options)
            except Exception as error:
                self.has_failed = True
                log.warning("%s: %s: it logs nothing more", type(self).__name__, reason(error))

    return method


def _without_undefined(log_metrics: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that logs only the metrics that are defined."""

    @wraps(log_metrics)
    def method(self: "RunLogger", metrics: Mapping[str, float], *args: Any, **options: Any) -> Any:
        defined = {name: value for name, value in metrics.items() if is_defined(name, value)}
        return log_metrics(self, defined, *args, **options)

    return method


class RunLogger(Logger):
    """A logger that writes into the run's folder by default, and continues there on `--resume`.

    Nothing is created before Lightning asks for `experiment` on rank 0, since the folder is not chosen earlier. If the
    logger cannot start, the command fails at its start. A later error is logged once, and the command continues.

    Attributes:
        package: The package that it needs, which is also the name of the extra that installs it.
        place: Its folder in the run's folder; "" for the run's folder.
        is_continued: Whether it has logged this run before.
        has_failed: Whether it is disabled after an error.
    """

    package = ""
    place = ""
    is_continued = False
    has_failed = False
    _run: Run | None = None
    _key = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.log_config = _as_value_error(cls.log_config)  # type: ignore[method-assign]
        if isinstance(begin := vars(cls).get("experiment"), property) and begin.fget:
            cls.experiment = property(_as_value_error(begin.fget))  # type: ignore[attr-defined]
        cls.log_metrics = _without_undefined(cls.log_metrics)  # type: ignore[method-assign]
        for name in _LATER:
            setattr(cls, name, _disable_on_error(getattr(cls, name)))

    def attach(self, run: Run, key: str) -> None:
        """Attach the logger to a run.

        Args:
            run: The run.
            key: Name of the logger, unique among those of the run.
        """
        self._run = run
        self._key = key

    @classmethod
    def check_package(cls) -> None:
        """Check that the package is installed.

        Raises:
            WrongUsage: It is missing or broken.
        """
        needed = install(cls.package)
        spec = find_spec(cls.package)
        # A spec without origin is a plain folder of that name, such as the ones that wandb writes.
        if spec is None or spec.origin is None:
            raise WrongUsage(f"{cls.__name__} needs {cls.package}: {needed}")
        try:
            import_module(cls.package)
        except Exception as error:  # for example, it was built for another version of a dependency
            message = f"{cls.__name__}: cannot import {cls.package}: {reason(error)}"
            hint = f"in a fresh environment, {needed}"
            raise WrongUsage(f"{message}; {hint}") from error

    def log_config(self, settings: Mapping[str, Any]) -> None:
        """Log the settings in config.yaml, by dotted names, unless they were logged before."""
        raise NotImplementedError

    def rewind(self, global_step: int) -> None:
        """Drop the steps from `global_step` on, which a resumed run repeats, if the library can do that."""

    def close(self) -> None:
        """Close the logger at the end of the command."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `log_config` logs all settings."""

    def _run_path(self) -> Path:
        """Choose the run's folder if necessary, and return it. Lightning needs it before `RunFolder` chooses one."""
        if self._run is None:
            raise ValueError(
                f"finetune.{type(self).__name__} belongs to a run of finetune; elsewhere take Lightning's"
            )
        return self._run.choose()

    def _run_folder(self) -> str:
        return str(self._run_path() / self.place)

    def _title(self) -> str:
        """Return the name of the run in lists of runs."""
        return "-".join(self._run_path().parts[-3:])  # some libraries take a slash for a folder

    def _earlier_name(self) -> str | None:
        """Return the name under which this run was logged before, and set `is_continued`; None in a new run."""
        before = RunDir(self._run_path()).facts().get("loggers", {}).get(self._key)
        self.is_continued = self.is_continued or before is not None
        return before

    def _remember(self, name: str) -> None:
        """Write the name under which this run is logged to run.json."""
        run = RunDir(self._run_path())
        run.update(loggers={**run.facts().get("loggers", {}), self._key: name})


class LoggedConfig(pl.Callback):
    """Logs the settings in config.yaml to the loggers of the run, once.

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
            logger.log_config(flatten(yaml.safe_load(self.folder.config)))
        self._is_done = True


def attach(loggers: Sequence[Logger], run: Run) -> None:
    """Attach each `RunLogger` among the loggers to a run."""
    names: list[str] = []
    for logger in run_loggers(loggers):
        names.append(type(logger).__name__)
        num = names.count(names[-1])
        logger.attach(run, names[-1] if num == 1 else f"{names[-1]} {num}")


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
