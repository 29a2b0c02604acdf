"""A checkpoint without some of its parts."""

import os
from collections.abc import Sequence
from pathlib import Path

from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint


def drop_parts(path: Path, names: Sequence[str]) -> None:
    """Rewrite a checkpoint without these parts; its time of modification stays."""
    checkpoint = read_checkpoint(path)
    if not any(name in checkpoint for name in names):
        return
    status = path.stat()
    for name in names:
        checkpoint.pop(name, None)
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)
    # test.json is that of this checkpoint as long as it is newer
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
