"""`finetune report` writes the report of a run, and `finetune compare` a page about several runs."""

from pathlib import Path

from finetune.data.addresses import is_address, is_in_bucket, parse_address
from finetune.inference.image_viewer import image_viewer
from finetune.inference.predictor import Predictor
from finetune.reports.comparison import write_comparison
from finetune.reports.report import measured_checkpoint, page_of
from finetune.runs.record import read_run
from finetune.settings.all_commands import CompareSettings, ReportSettings
from finetune.system.files import check_target
from finetune.system.messages import WrongUsage


def report(options: ReportSettings) -> None:
    """Write the report of a run."""
    if len(options.runs) != 1:
        raise WrongUsage(
            "name the folder of one run: finetune report RUN (finetune compare RUN_A RUN_B compares runs)"
        )
    if is_address(options.runs[0]) and options.output is None:
        raise WrongUsage("the report of a run in object storage needs a place: --out FILE.html")
    run = _local(options.runs[0])
    record = read_run(run)
    target = _target(options.output, run / "report.html")
    page_of(record, target)
    print(record.headline_text)
    print(f"report in {target}")


def compare(options: CompareSettings) -> None:
    """Compare runs on one page."""
    if len(options.runs) < 2:
        raise WrongUsage("two runs are needed: finetune compare RUN_A RUN_B")
    records = [read_run(_local(run)) for run in options.runs]
    if len({record.path.resolve() for record in records}) < len(records):
        raise WrongUsage("one run is named twice: finetune compare RUN_A RUN_B")
    target = _target(options.output, Path())
    checkpoint = measured_checkpoint(records[0]) if len(records) == 2 else None
    viewer = image_viewer(Predictor(checkpoint)) if checkpoint else None
    print(write_comparison(records, viewer, target))
    print(f"report in {target}")


def _local(run: str) -> Path:
    """Return the folder of a run: its downloaded files, if it is in object storage."""
    if not is_in_bucket(run):
        return Path(run)
    # imported here, since most runs need no object storage
    from finetune.runs.sync import pull_results

    parse_address(run)
    return pull_results(run)


def _target(output: str | None, default: Path) -> Path:
    """Return the page to write, in an existing folder."""
    target = Path(output or default)
    check_target(target, "--out" if output else "the page")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
