"""The test images of a run by names that other runs and folders may share."""

import os

from finetune.data.addresses import is_address
from finetune.runs.record import RunRecord


def tested_names(run: RunRecord) -> list[str]:
    """Return the paths of the test images below the data folder of a run; that of an image elsewhere is absolute.

    A data folder that was moved or copied has images of the same names.
    """
    folder = run.result.get("image_folder")  # for an archive or a dataset of the hub, in the cache
    prefix = os.path.join(_absolute(run, str(folder)) if folder else data_folder(run), "")
    paths = run.predictions.paths if run.predictions else []
    return [_absolute(run, path).removeprefix(prefix) for path in paths]


def data_folder(run: RunRecord) -> str:
    """Return the absolute path or the address of the folder of the images of a run."""
    root = run.setting("data", "init_args", "root")
    table = run.setting("data", "init_args", "table")
    folder = run.facts.root or ""
    if isinstance(root, str):
        folder = root.rstrip("/")
    elif isinstance(table, str):
        folder = os.path.dirname(table)
    return _absolute(run, folder)


def _absolute(run: RunRecord, path: str) -> str:
    """Return the absolute path of a path that is relative to the folder in which a run began."""
    return path if is_address(path) else os.path.abspath(os.path.join(run.begun_in, path))
