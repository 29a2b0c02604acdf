"""What Lightning's loggers are given beside what they can do: a place in the run's folder, its config, a picture."""

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
from PIL import Image
from pytorch_lightning.loggers.logger import Logger

from finetune.runs.folder import Run, RunFolder
from finetune.runs.metrics_csv import is_defined
from finetune.runs.side_files import are_names, continue_side_file, read_side_file
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage, install, reason

FILE = "loggers.json"  # in the run's folder: by what names its loggers go on
# what is done of a run that has begun
_LATER = ("log_metrics", "log_picture", "save", "finalize", "close")
log = logging.getLogger(__name__)


def _told(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that tells what a library raises, whatever its kind, as an error of the logger's."""

    @wraps(begin)
    def method(self: "RunLogger", *args: Any) -> Any:
        try:
            return begin(self, *args)
        except WrongUsage:
            raise
        except Exception as error:
            name, text = type(self).__name__, reason(error)
            raise ValueError(text if text.startswith(name) else f"{name}: {text}") from error

    return method


def _outlived(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that says once what it raises, and does nothing afterwards: a run is worth more than its log."""

    @wraps(act)
    def method(self: "RunLogger", *args: Any, **options: Any) -> Any:
        if not self.has_failed:
            try:
                return act(self, *args, **options)
            except Exception as error:
                self.has_failed = True
                log.warning(
                    "%s: %s: from here on it logs nothing", type(self).__name__, reason(error)
                )

    return method


def _of_defined(log_metrics: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that logs the metrics that are defined."""

    @wraps(log_metrics)
    def method(self: "RunLogger", metrics: Mapping[str, float], *args: Any, **options: Any) -> Any:
        defined = {name: value for name, value in metrics.items() if is_defined(name, value)}
        return log_metrics(self, defined, *args, **options)

    return method


class RunLogger(Logger):
    """A logger that writes into a run's folder, unless it is told another place, and goes on there on `--resume`.

    Nothing is made before Lightning asks for `experiment`, on the first device alone: the folder is not chosen earlier.
    Where it can't begin the command fails, at its start; what fails later is said in a line, and the command goes on.

    Attributes:
        package: What it needs, which is also the name of our extra with it.
        place: Its folder in the run's; "" for the run's own.
        goes_on: Whether it has logged of this run before.
        has_failed: Whether it logs no more.
    """

    package = ""
    place = ""
    goes_on = False
    has_failed = False
    _run: Run | None = None
    _key = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.log_config = _told(cls.log_config)  # type: ignore[method-assign]
        if isinstance(begin := vars(cls).get("experiment"), property) and begin.fget:
            cls.experiment = property(_told(begin.fget))  # type: ignore[attr-defined]
        cls.log_metrics = _of_defined(cls.log_metrics)  # type: ignore[method-assign]
        for name in _LATER:
            setattr(cls, name, _outlived(getattr(cls, name)))

    def attach(self, run: Run, key: str) -> None:
        """Tell it whose logger it is.

        Args:
            run: The run.
            key: What tells it from the others of that run.
        """
        self._run, self._key = run, key

    @classmethod
    def check_package(cls) -> None:
        """Make sure that what it needs is installed.

        Raises:
            WrongUsage: It is not, or is broken.
        """
        needed = install(cls.package)
        spec = find_spec(cls.package)
        # a folder of that name, as wandb leaves them where it is used
        if spec is None or spec.origin is None:
            raise WrongUsage(f"{cls.__name__} needs {cls.package}: {needed}")
        try:
            import_module(cls.package)
        except Exception as error:  # built for another version of what it needs, for one
            told = f"{cls.__name__}: {cls.package} can't be imported: {reason(error)}"
            hint = f"in a fresh environment, {needed}"
            raise WrongUsage(f"{told}; {hint}") from error

    def log_config(self, settings: Mapping[str, Any]) -> None:
        """Log what config.yaml says, by dotted names, unless it did so before."""
        raise NotImplementedError

    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        """Log a picture that belongs to a step."""
        raise NotImplementedError

    def rewind(self, global_step: int) -> None:
        """Forget the steps from `global_step` on, which a resumed run does again, if it can."""

    def close(self) -> None:
        """End it: the command logs nothing more."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """`log_config` logs these and all others."""

    def _run_path(self) -> Path:
        """Return the run's folder, and choose it: Lightning asks before it calls the hook in which that is done."""
        if self._run is None:
            raise ValueError(
                f"finetune.{type(self).__name__} belongs to a run of finetune; elsewhere take Lightning's"
            )
        return self._run.choose()

    def _run_folder(self) -> str:
        return str(self._run_path() / self.place)

    def _title(self) -> str:
        """Return what the run is called where several stand beside each other."""
        return "-".join(self._run_path().parts[-3:])  # a name with slashes is a folder to some

    def _take_up(self) -> str | None:
        """Return the name by which this run was logged before; None in a new run."""
        names = continue_side_file(
            self._run_path() / FILE, are_names, "the run's loggers begin anew"
        )
        before = names.get(self._key)
        self.goes_on = self.goes_on or before is not None
        return before

    def _remember(self, name: str) -> None:
        path = self._run_path() / FILE
        replace_text(
            path, json.dumps({**read_side_file(path, are_names), self._key: name}, indent=2) + "\n"
        )


class LoggedConfig(pl.Callback):
    """Lets the loggers that write into the run's folder log what config.yaml says, once.

    Args:
        folder: What writes config.yaml.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self._is_done = folder, False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for logger in () if self._is_done else ours(trainer.loggers):  # a fit ends with a test
            logger.log_config(flat(yaml.safe_load(self.folder.text())))
        self._is_done = True


def attach(loggers: Sequence[Logger], run: Run) -> None:
    """Tell the loggers among these that are ours to which run they belong."""
    names: list[str] = []
    for logger in ours(loggers):
        names.append(type(logger).__name__)
        num = names.count(names[-1])
        logger.attach(run, names[-1] if num == 1 else f"{names[-1]} {num}")


def ours(loggers: Sequence[Logger]) -> list[RunLogger]:
    """Return those that write into the run's folder."""
    return [logger for logger in loggers if isinstance(logger, RunLogger)]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one table of dotted names; what is neither number nor text is JSON."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            table |= flat(value, f"{prefix}{key}.")
        else:
            is_plain = isinstance(value, (bool, int, float, str))
            table[f"{prefix}{key}"] = value if is_plain else json.dumps(value, default=str)
    return table
