"""What came out of a run, small enough for a notebook's cell: the result, how it learned, some test pictures."""

from pathlib import Path

from finetune.runs.headline import headline
from finetune.runs.html_report import learning
from finetune.runs.record import RunRecord
from finetune.system.html_page import render


def inline_report(run: RunRecord, sheet: str = "", about_sheet: str = "") -> str:
    """Return a piece of HTML that needs nothing else, and no script.

    Args:
        run: What the folder holds.
        sheet: The address that holds a picture of predicted pictures; "" for none.
        about_sheet: The same in a sentence.
    """
    # A notebook is handed around: no more of a machine's folders than one needs.
    place = run.path.relative_to(Path.cwd()) if run.path.is_relative_to(Path.cwd()) else run.path
    report = place / "report.html"
    return render(
        "runs/inline_report.html",
        place=place,
        headline=str(headline(run)),
        charts=list(learning(run))[:2],  # the loss and the accuracy
        sheet=sheet,
        about_sheet=about_sheet,
        report=report if report.is_file() else "",
    )
