"""A run's folder in the place of a checkpoint: its best one."""

import os
from pathlib import Path

from finetune.runs.run_search import is_numbered, read_about
from finetune.system.messages import WrongUsage


def checkpoint_of(path: str) -> tuple[str, str]:
    """Return the checkpoint that a path means, and what is to be told of it ("" for nothing).

    Args:
        path: A run's folder, whose best checkpoint is meant, or its last where there is no best; anything else is
            returned as it is.

    Raises:
        WrongUsage: A folder without checkpoints.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path, ""
    for place in (folder / "checkpoints", folder):  # the folder of the checkpoints itself will do
        best, last = place / "best.ckpt", place / "last.ckpt"
        if best.is_file():
            return str(best), ""
        if last.is_file():
            return str(last), f"{path} has no best checkpoint: {last} it is"
    runs = sorted(folder.glob("*/checkpoints/*.ckpt")) or sorted(
        folder.glob("*/*/checkpoints/*.ckpt")
    )
    newest = max(runs, key=os.path.getmtime, default=None)
    hint = f"; did you mean {newest.parents[1]}?" if newest else ""
    raise WrongUsage(f"the folder {path} is no run: it holds no checkpoints/best.ckpt{hint}")


def run_of(path: str) -> str:
    """Return the folder of the run that a path is, or that it lies in as checkpoints do; "" where it is none."""
    place = Path(path)
    if place.is_file():
        place = place.parent
    if place.name == "checkpoints":
        place = place.parent
    # or it is a data folder
    has_begun = (
        (place / "checkpoints").is_dir() or is_numbered(place.name) or bool(read_about(place))
    )
    is_run = (place / "checkpoints/last.ckpt").is_file() or (
        (place / "config.yaml").is_file() and has_begun
    )
    return str(place) if is_run else ""
