"""Finds the best checkpoint of a run's folder, and the run's folder of a checkpoint."""

import os
from pathlib import Path

from finetune.models.hub import download_weights, is_hub
from finetune.runs.run_dir import RunDir
from finetune.system.messages import WrongUsage


def checkpoint_of(path: str) -> tuple[str, str]:
    """Return the checkpoint that a path means, and a message about it ("" for none).

    Args:
        path: A run's folder, which means its best checkpoint, or its last if there is no best. An address on the
            Hugging Face hub, whose weights are downloaded. Any other path is returned unchanged.

    Raises:
        WrongUsage: The path is a folder without checkpoints, or several fits that have not ended.
        OSError: The weights cannot be downloaded.
    """
    if is_hub(path):
        return str(download_weights(path)), ""
    folder = Path(path)
    if not folder.is_dir():
        return path, ""
    for place in (folder / "checkpoints", folder):  # the folder of the checkpoints is accepted too
        best = place / "best.ckpt"
        last = place / "last.ckpt"
        if best.is_file():
            return str(best), ""
        if last.is_file():
            return str(last), f"{path} has no best checkpoint: taking {last}"
    if RunDir(folder).fits:
        raise WrongUsage(
            f"{path} has several fits, and has not ended: finetune fit --resume {path} continues it"
        )
    runs = sorted(folder.glob("*/checkpoints/*.ckpt")) or sorted(
        folder.glob("*/*/checkpoints/*.ckpt")
    )
    newest = max(runs, key=os.path.getmtime, default=None)
    if newest:
        hint = f"; did you mean {newest.parents[1]}?"
    elif (folder / "model.safetensors").is_file():
        hint = ", nor a folder of timm: it has no config.json next to model.safetensors"
    else:
        hint = ""
    raise WrongUsage(f"the folder {path} is not a run: it has no checkpoints/best.ckpt{hint}")


def run_of(path: str) -> str:
    """Return the folder of the run that a path belongs to; "" if it belongs to none.

    Args:
        path: A run's folder, a file in it, its folder of checkpoints, or a checkpoint.
    """
    place = Path(path)
    if place.is_file():
        place = place.parent
    if place.name == "checkpoints":
        place = place.parent
    return str(place) if RunDir(place).is_run else ""
