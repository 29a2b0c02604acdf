"""`finetune report`: write the report of a run, or a comparison of several runs, on one page."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune.commands.parser import OneLineErrorParser, PlainHelpFormatter
from finetune.commands.run_places import local_results
from finetune.data.addresses import is_address
from finetune.inference.image_viewer import image_viewer
from finetune.inference.predictor import Predictor
from finetune.runs.comparison import write_comparison
from finetune.runs.data_check import DataCheck, data_check
from finetune.runs.headline import headline
from finetune.runs.html_report import write_report
from finetune.runs.record import RunRecord, read_run
from finetune.system.files import check_target
from finetune.system.messages import WrongUsage

_REPORT = """\
Writes report.html into a run's folder: the result, classes, mistakes, how to repeat it. Several runs are
compared on one page, as by finetune compare.

for example:
  finetune report runs/fit/version_0
  finetune report runs/fit/version_0 --out result.html"""
_COMPARE = """\
Compares runs on one page: results with intervals, and settings that differ. Two runs that were tested on the
same images are also compared image by image.

for example:
  finetune compare runs/fit/version_0 runs/fit/version_1
  finetune compare runs/fit/version_* --out all.html"""


def report(arguments: Sequence[str], command: str = "report") -> None:
    """Write the report of one run, or the comparison of several; see `finetune report --help`.

    Args:
        arguments: The arguments of the command.
        command: `report`, or `compare`, which takes at least two runs.
    """
    usage = "RUN [RUN ...] [--out FILE.html] [--check check.json]"
    description = _REPORT
    default_page = "report.html in the run's folder; comparison.html for several runs"
    if command == "compare":
        usage = "RUN_A RUN_B [RUN ...] [--out FILE.html]"
        description = _COMPARE
        default_page = "comparison.html"
    parser = OneLineErrorParser(
        prog=f"finetune {command}",
        usage=f"finetune {command} {usage}",
        description=description,
        formatter_class=PlainHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="Folder of a run of `finetune fit` or `finetune test`.",
    )
    parser.add_argument(
        "--out",
        "--output",
        dest="output",
        metavar="FILE.html",
        help=f"The page to write [{default_page}].",
    )
    if command == "report":
        parser.add_argument(
            "--check",
            metavar="check.json",
            help="Result of `finetune check` on the data [check.json where the run began, if it matches].",
        )
    parsed = parser.parse_args(list(arguments))
    if len(parsed.runs) == 1 and is_address(parsed.runs[0]) and parsed.output is None:
        raise WrongUsage("the report of a run in object storage needs a place: --out FILE.html")
    runs = list(map(local_results, parsed.runs))
    output = parsed.output
    if not runs:
        raise WrongUsage(f"name the folder of a run: finetune {command} {usage.split(' [')[0]}")
    if command == "compare" and len(runs) < 2:
        raise WrongUsage("two runs are needed: finetune compare RUN_A RUN_B")
    records = [read_run(run) for run in runs]
    if len({record.path.resolve() for record in records}) < len(records):
        raise WrongUsage(
            "pass one run's folder, or several different ones: finetune report RUN_A RUN_B"
        )
    checked = getattr(parsed, "check", None)
    if checked is not None and len(records) > 1:
        raise WrongUsage("--check goes with one run: finetune report RUN --check check.json")
    check = data_check(records[0], checked) if len(records) == 1 else None
    target = Path(output or (runs[0] / "report.html" if len(runs) == 1 else "comparison.html"))
    check_target(target, "--out" if output else "the page")
    target.parent.mkdir(parents=True, exist_ok=True)
    if len(records) == 1:
        page_of(records[0], target, check)
        print(headline(records[0]))
    else:
        checkpoint = _checkpoint(records[0]) if len(records) == 2 else None
        viewer = image_viewer(Predictor(checkpoint)) if checkpoint else None
        print(write_comparison(records, viewer, target))
    print(f"report in {target}")


def page_of(
    record: RunRecord,
    target: Path | None = None,
    check: DataCheck | None = None,
) -> Path:
    """Write the report of a run that has ended, and return its path.

    Args:
        record: The content of the folder of the run.
        target: The path of the report; None for report.html in the folder.
        check: The results of `finetune check` on its data.
    """
    checkpoint = _checkpoint(record)
    if checkpoint is None:
        return write_report(record, None, {}, target=target, check=check)
    predictor = Predictor(checkpoint)
    viewer = image_viewer(predictor) if record.answers or record.label_answers else None
    if viewer is not None and "folds" in record.result:
        # this checkpoint has seen the images; the network of another fold predicted them
        viewer = replace(viewer, overlay=lambda *_: "The reports of the folds have heat maps.")
    return write_report(record, viewer, predictor.versions, target=target, check=check)


def _checkpoint(run: RunRecord) -> Path | None:
    """Return the best checkpoint of a fit, or the checkpoint of a test; None if neither exists."""
    measured = run.result.get("checkpoint")
    places = [run.path / "checkpoints" / "best.ckpt", *([run.path / measured] if measured else [])]
    return next((path for path in places if path.is_file()), None)
