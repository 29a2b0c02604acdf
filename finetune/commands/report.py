"""`finetune report`: what came out of a run, or of several side by side, on one page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.splits import Split
from finetune.inference.lens import lens
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.comparison import write_comparison
from finetune.runs.html_report import headline, write_report
from finetune.runs.record import RunRecord, read_run
from finetune.system.files import check_target
from finetune.system.messages import WrongUsage


def report(runs: list[str], output: str = "comparison.html") -> None:
    """Write report.html into a run's folder: the result, classes, pictures that it gets wrong, how to repeat it.

    Several runs come side by side on one page, two of them also picture by picture.

    Args:
        runs: Folders of runs of `finetune fit` or `test`, said without the name of this option.
        output: The page of several runs.
    """
    records = [read_run(Path(run)) for run in runs]
    if len(records) == 1:
        path = page_of(Path(runs[0]))
        print(headline(records[0]))
        print(f"report in {path}")
        return
    if len({record.path.resolve() for record in records}) < len(records) or not records:
        raise WrongUsage("give one run's folder, or several different ones: finetune report RUN_A RUN_B")
    check_target(output, "--output")
    checkpoint = _checkpoint(records[0]) if len(records) == 2 else None
    look = lens(Predictor(checkpoint)) if checkpoint else None
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    print(write_comparison(records, look, Path(output)))
    print(f"report in {output}")


def reader(split: Split | None) -> Callable[[str], np.ndarray] | None:
    """Return what gives the picture of a path, for a split whose paths are no files."""
    if split is None or not len(split.paths) or Path(split.paths[0]).is_file():
        return None
    index = {path: i for i, path in enumerate(split.paths)}
    return lambda path: split.read(index[path])


def page_of(folder: Path, read: Callable[[str], np.ndarray] | None = None) -> Path:
    """Write the page of a run that has ended.

    Args:
        folder: The run's.
        read: Gives the picture of a path, where paths are no files.
    """
    record = read_run(folder)
    checkpoint = _checkpoint(record)
    if checkpoint is None:
        return write_report(record, None, {})
    origin: dict[str, Any] = read_checkpoint(checkpoint)["finetune"]
    versions = {"finetune": origin["version"], "torch": origin["torch"]}
    look = lens(Predictor(checkpoint), read) if record.answers else None
    return write_report(record, look, versions)


def _checkpoint(run: RunRecord) -> Path | None:
    """Return the best checkpoint of a fit, or that which a test has measured; None where neither is there."""
    measured = run.result.get("checkpoint")
    places = [run.path / "checkpoints" / "best.ckpt", *([Path(measured)] if measured else [])]
    return next((path for path in places if path.is_file()), None)
