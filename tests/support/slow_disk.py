"""A disk on which no checkpoint is written before the fit waits for it."""

import threading
from pathlib import Path
from typing import Any

from finetune.runs.background_writer import BackgroundWriter
from finetune.runs.checkpoint_io import AtomicCheckpointIO


def slow_down(patch: Any) -> list[str]:
    """Slow the disk down by a `MonkeyPatch`, and return the names and steps of what is written, in their order."""
    written: list[str] = []
    is_waited_for = threading.Event()
    save = AtomicCheckpointIO.save_checkpoint
    finish = BackgroundWriter.finish

    def save_slowly(own: Any, checkpoint: dict[str, Any], path: Path, *arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_waited_for.wait(30)  # not forever, if a control keeps the fit from waiting
        save(own, checkpoint, path, *arguments)
        written.append(f"{path.stem} {checkpoint['global_step']}")

    def finish_slowly(writer: BackgroundWriter) -> None:
        is_waited_for.set()
        finish(writer)
        is_waited_for.clear()

    patch.setattr(AtomicCheckpointIO, "save_checkpoint", save_slowly)
    patch.setattr(BackgroundWriter, "finish", finish_slowly)
    return written
