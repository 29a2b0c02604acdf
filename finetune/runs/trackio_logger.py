"""A logger for Trackio, of which Lightning has none: a database in the run's folder, and no server."""

import io
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from PIL import Image
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.run_logger import RunLogger

_PLACES = {"TRACKIO_DIR": "", "MEDIA_DIR": "media", "ARTIFACTS_DIR": "artifacts"}


class TrackioLogger(RunLogger):
    """Writes what `trackio show` shows.

    Args:
        project: The project that the run is one of.
        run_name: By default the run's folder.
        save_dir: Where; by default the folder `trackio` in the run's.
    """

    package = place = "trackio"

    def __init__(self, project: str = "finetune", run_name: str | None = None, save_dir: str | None = None) -> None:
        super().__init__()
        self.check_package()
        self.project, self.run_name, self._dir = project, run_name, save_dir
        self._experiment: Any = None
        self._before: dict[str, dict[str, Any]] = {}

    @property
    def name(self) -> str:
        return self.project

    @property
    def version(self) -> str | None:
        return self._experiment.id if self._experiment is not None else None

    @property
    def save_dir(self) -> str | None:
        return self._dir

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of Trackio's."""
        if self._experiment is None:
            folder = Path(self._dir or self._run_folder()).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            self._before = write_into(folder)
            from trackio import Run

            class LocalRun(Run):
                def _get_username(self) -> None:
                    """Return none: where somebody has logged in the hub would be asked."""

            name, before = self.run_name or self._title(), self._take_up()
            self._experiment = LocalRun(None, self.project, None, name, before, existing_runs=[])
            self._remember(self._experiment.id)
            if self.goes_on:  # an incomplete one would replace that of before
                self._experiment.config.clear()
        return self._experiment

    @rank_zero_only
    def log_config(self, settings: Mapping[str, Any]) -> None:
        if not self.goes_on:
            self.experiment.config.update(settings)  # which goes with the first row

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step)

    @rank_zero_only
    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        from trackio import Image as Picture

        self.experiment.log({name: Picture(image)}, step)

    def finalize(self, status: str) -> None:
        self.close()  # this process may end without another word, as spawned ones do

    @rank_zero_only
    def close(self) -> None:
        if self._experiment is not None:
            with redirect_stdout(io.StringIO()):  # it announces an upload
                self._experiment.finish()
            self._experiment = None
            for module, places in self._before.items():
                vars(sys.modules[module]).update(places)


def write_into(folder: Path) -> dict[str, dict[str, Any]]:
    """Let Trackio write there: it settles when it is imported where all runs of a process go.

    Returns:
        What its modules said before.
    """
    import trackio.utils

    os.environ["TRACKIO_DIR"] = str(folder)  # for what it starts
    before = {}
    for module in [name for name in list(sys.modules) if name.partition(".")[0] == "trackio"]:
        variables = vars(sys.modules[module])
        before[module] = {name: variables[name] for name in _PLACES if name in variables}
        variables.update({name: folder / _PLACES[name] for name in before[module]})
    assert before["trackio.utils"].keys() == _PLACES.keys(), trackio.utils
    return before
