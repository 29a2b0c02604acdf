"""What `finetune.fit` returns: the run's folder, its best checkpoint and its results."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.samplers import SHEET, draw_indices
from finetune.inference.image_viewer import image_viewer
from finetune.inference.predictor import Predictor
from finetune.reports.inline_report import ShownImage, inline_report
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.predictions_table import Predictions
from finetune.runs.record import read_run
from finetune.runs.run_dir import RunDir
from finetune.system.html_page import thumbnail
from finetune.system.messages import shown

# images in a notebook, and their side in pixels
_NUM_SHOWN = 16
_SIDE = 120


def _number(name: str, text: str | None) -> float | int | None:
    """Return a value of a column of metrics.csv; None if it was not logged."""
    if not text:
        return None
    return int(text) if name in ("epoch", "step") else float(text)


def _history(run: Path) -> list[dict[str, float | int | None]]:
    """Return the rows of a run's metrics.csv; see `FittedRun.history`."""
    rows = read_metrics(run / "metrics.csv")
    return [{name: _number(name, text) for name, text in row.items()} for row in rows]


class FittedRun:
    """A finished run; it can be passed as the path of its folder.

    Args:
        path: The run's folder.

    Attributes:
        path: The same as an absolute path.
        best: The checkpoint of the best epoch; of a cross-validation or an ensemble all networks as one.
        record: The content of the folder: config, metrics, the prediction for each test image.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.best = self.path / "checkpoints" / "best.ckpt"
        self.record = read_run(self.path)

    @property
    def result(self) -> dict[str, Any]:
        """The content of test.json, such as `test/accuracy` and `confusion_matrix`; empty if nothing was tested.

        If the images have groups, `groups` has the same with groups counted instead of images.
        """
        return self.record.result

    @property
    def history(self) -> list[dict[str, float | int | None]]:
        """The rows of metrics.csv, one dict per epoch, such as `{"epoch": 1, "val/accuracy": 0.9, …}`.

        `epoch` and `step` are int, all others float; a value that was not logged in an epoch is None. The rows of a
        cross-validation are those of its folds, with their number in `fold`; of an ensemble those of its members, in
        `member`. `pandas.DataFrame(run.history)` makes a table of it.
        """
        fits = RunDir(self.path).fits
        if not fits:
            return _history(self.path)
        name = fits[0].path.name.partition("_")[0]  # fold or member
        return [
            {name: number, **row}
            for number, run in enumerate(fits, 1)
            for row in _history(run.path)
        ]

    @property
    def accuracy(self) -> float | None:
        """The share of the test images that are classified correctly; None if nothing was tested.

        It is also None if images have several labels: see `mean_average_precision`.
        """
        return self._tested("accuracy")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy, or of the mean average precision; None if nothing was tested."""
        result = self.record.facts.test
        return None if result is None else (result.low, result.high)

    @property
    def mean_average_precision(self) -> float | None:
        """The mean average precision on the test images if they have several labels; None otherwise."""
        return self._tested("mAP")

    def _tested(self, metric: str) -> float | None:
        """Return a metric of the test; None if nothing was tested, or the test has another one."""
        result = self.record.facts.test
        return result.value if result is not None and result.metric == metric else None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<run in {shown(self.path)}: {self.record.headline_text}>"

    def _repr_html_(self) -> str:
        """Return the result, the learning curves, and some test images with their predictions."""
        return inline_report(self.record, self._test_images())

    def _test_images(self) -> list[ShownImage]:
        """Return random test images; none without predictions, or if the images are gone."""
        predictions = self.record.predictions
        if predictions is None or not predictions.paths or not self.best.is_file():
            return []
        viewer = image_viewer(Predictor(self.best))
        chosen = np.sort(draw_indices(len(predictions.paths), _NUM_SHOWN, SHEET, 0)).tolist()
        images = [(i, viewer.see(predictions.paths[i], _SIDE)) for i in chosen]
        return [
            ShownImage(
                thumbnail(image, _SIDE), _caption(predictions, i), bool(predictions.is_right[i])
            )
            for i, image in images
            if image is not None
        ]


def _caption(predictions: Predictions, i: int) -> str:
    """Return the predicted class or labels of image `i`, with their probabilities."""
    p = predictions.probabilities[i]
    chosen = np.flatnonzero(predictions.decided[i])
    return ", ".join(f"{predictions.names[k]} {100 * p[k]:.0f} %" for k in chosen) or "no label"
