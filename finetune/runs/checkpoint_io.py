"""Checkpoint files: written atomically, and read without running code from them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from finetune.models.checkpoint import REQUIRED_SECTIONS, check_checkpoint
from finetune.models.weight_files import load_safely
from finetune.runs.exported_files import READABLE, read_exported
from finetune.system.files import check_no_lfs_pointer, replacing, unfinished


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its target, syncs and renames it, so that a kill leaves the previous one intact.

    Lightning's own class writes to the system's temporary folder first. If that is on another file system, the last
    step is a copy, which is not atomic.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: The content.
            path: The file.
            storage_options: A function that is called when the new file is complete, before it replaces an older one.

        Raises:
            OSError: It could not be written. The older file is as it was.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in unfinished(target):
            leftover.unlink(missing_ok=True)
        try:
            with replacing(target) as temporary:
                with open(temporary, "wb") as file:
                    torch.save(checkpoint, file)
                if storage_options is not None:
                    storage_options()
        except (OSError, RuntimeError) as error:
            message = str(error)
            # This word is in the message of torch's writer if a write has failed, but not in errors of a GPU.
            if "inline_container" in message and isinstance(error.__context__, OSError):
                message = str(error.__context__)
            elif "inline_container" in message:
                free = shutil.disk_usage(target.parent).free / 1e6
                message = f"the disk is full: {free:.0f} MB are free without the incomplete file ({message})"
            raise OSError(f"the checkpoint {target} could not be written: {message}") from error

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        return _load(path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint of `finetune fit` or a file of `finetune export`, without running code from it.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not such a checkpoint, or its content is invalid.
    """
    checkpoint = _load(path)
    if not _is_ours(checkpoint):
        raise ValueError(
            f"{str(path)!r} is not a checkpoint of `finetune fit`; plain weights need their network: "
            "--backbone NAME --weights FILE"
        )
    return checkpoint


def _load(path: str | Path) -> Any:
    if Path(path).is_file():
        check_no_lfs_pointer(path)
    checkpoint = read_exported(path) if Path(path).suffix in READABLE else load_safely(path)
    if _is_ours(checkpoint):
        check_checkpoint(checkpoint, path)
    return checkpoint


def _is_ours(checkpoint: Any) -> bool:
    return isinstance(checkpoint, dict) and checkpoint.keys() >= REQUIRED_SECTIONS
