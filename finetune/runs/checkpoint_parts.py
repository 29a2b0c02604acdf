"""The parts of a checkpoint: how large some are, and a checkpoint without them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint


def tensor_bytes(path: Path, names: Sequence[str]) -> int:
    """Return how many bytes the tensors in these parts of a checkpoint take."""
    checkpoint = read_checkpoint(path)
    tensors = [tensor for name in names for tensor in _tensors(checkpoint.get(name))]
    return sum(tensor.nbytes for tensor in tensors)


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
