"""A short report for a cell of a notebook: the result, the training curves and some test images."""

from pathlib import Path

from finetune.reports.report import training_charts
from finetune.runs.record import RunRecord
from finetune.system.html_page import render


def inline_report(run: RunRecord, sheet: str = "", about_sheet: str = "") -> str:
    """Return the report as HTML without scripts or other files.

    Args:
        run: The content of the run's folder.
        sheet: Data URL of a contact sheet of predictions; "" for none.
        about_sheet: A sentence that describes the contact sheet.
    """
    # Notebooks are shared: a relative path, where possible, does not reveal the machine's folders.
    place = run.path.relative_to(Path.cwd()) if run.path.is_relative_to(Path.cwd()) else run.path
    report = place / "report.html"
    return render(
        "reports/inline_report.html",
        place=place,
        headline=run.headline_text,
        charts=list(training_charts(run))[:2],  # the loss and the accuracy
        sheet=sheet,
        about_sheet=about_sheet,
        report=report if report.is_file() else "",
    )
