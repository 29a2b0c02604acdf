"""The report of a run, with what its best checkpoint sees."""

from dataclasses import replace
from pathlib import Path

from finetune.inference.image_viewer import image_viewer
from finetune.inference.predictor import Predictor
from finetune.reports.report import write_report
from finetune.runs.record import RunRecord


def page_of(record: RunRecord, target: Path | None = None) -> Path:
    """Write the report of a run that has ended, and return its path.

    Args:
        record: The content of the folder of the run.
        target: The path of the report; None for report.html in the folder.
    """
    checkpoint = measured_checkpoint(record)
    if checkpoint is None:
        return write_report(record, None, {}, target=target)
    predictor = Predictor(checkpoint)
    viewer = image_viewer(predictor) if record.predictions else None
    if viewer is not None and "folds" in record.result:
        # this checkpoint has seen the images; the network of another fold predicted them
        viewer = replace(viewer, overlay=lambda *_: "The reports of the folds have heat maps.")
    return write_report(record, viewer, predictor.versions, target=target)


def measured_checkpoint(run: RunRecord) -> Path | None:
    """Return the best checkpoint of a fit, or the checkpoint of a test; None if neither exists."""
    measured = run.result.get("checkpoint")
    places = [run.path / "checkpoints" / "best.ckpt", *([run.path / measured] if measured else [])]
    return next((path for path in places if path.is_file()), None)
