"""A short report for a cell of a notebook: the result, the training curves and some test images."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from finetune.reports.report import training_charts
from finetune.runs.record import RunRecord
from finetune.system.html_page import render


class ShownImage(NamedTuple):
    """A test image: its content as a data URL, its prediction, and whether that is right."""

    address: str
    caption: str
    is_right: bool


def inline_report(run: RunRecord, images: Sequence[ShownImage] = ()) -> str:
    """Return the report as HTML without scripts or other files.

    Args:
        run: The content of the run's folder.
        images: Some of its test images.
    """
    # Notebooks are shared: a relative path, where possible, does not reveal the machine's folders.
    place = run.path.relative_to(Path.cwd()) if run.path.is_relative_to(Path.cwd()) else run.path
    report = place / "report.html"
    return render(
        "reports/inline_report.html",
        place=place,
        headline=run.headline_text,
        charts=list(training_charts(run))[:2],  # the loss and the accuracy
        images=images,
        num_tested=0 if run.predictions is None else len(run.predictions.paths),
        report=report if report.is_file() else "",
    )
