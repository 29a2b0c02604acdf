"""Delete the files of a run, or those that only resuming needs."""

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from finetune.runs.run_dir import RECORD, RunDir
from finetune.runs.run_lock import LOCK, check_free, holding
from finetune.runs.run_table import size_of
from finetune.system.messages import NotFound, WrongUsage

# What training writes next to the weights, and only resuming reads.
_TRAINING_STATE = ("optimizer_states", "lr_schedulers")
# The files that a fit, its loggers and `finetune export` write in the folder of a run; of several fits also beneath it.
_OURS = re.compile(
    r"(fit/(fold|member)_\d+/|test/version_\d+/)?"
    r"((run|test|val)\.json|config\.yaml|skipped\.txt"
    r"|(metrics|steps|(test_)?(group_)?predictions)\.csv|report\.html|augmented\.webp"
    r"|\.finetune|\.lock|\.children\.lock|\.sync|\.uploaded\.json"
    r"|checkpoints/(best|last)(\.ckpt|(\.int8)?\.(onnx|safetensors)(\.json)?)"
    r"|checkpoints/(best|last)\.timm/(README\.md|(config|finetune)\.json|model\.safetensors)"
    r"|(checkpoints/((best|last)\.timm/)?)?\.[^/]+\.[0-9a-f]{8}\.tmp|checkpoints/\.[^/]+\.lock"
    r"|(mlflow|tensorboard|wandb)/.+)"
    r"|(fit|test)/\.finetune",
    re.DOTALL,
)


def check_removable(path: Path) -> None:
    """Make sure that a folder is a run that may be deleted.

    Raises:
        WrongUsage: `fit` did not write it, or it is one of several fits.
        ValueError: A process writes it, or its record is damaged.
    """
    if not path.exists():
        raise NotFound(f"there is no run {path}")
    run = RunDir(path)
    if path.is_symlink() or not run.is_run or run.facts.kind != "fit":
        raise WrongUsage(f"{path} is not the folder of a run of finetune fit: nothing is deleted")
    own = RunDir(path.resolve())
    joined = next((run for run in map(RunDir, own.path.parents) if own in run.fits), None)
    if joined is not None:
        raise WrongUsage(
            f"{path} is a part of {joined.path}: finetune runs rm {shlex.quote(str(joined.path))}"
        )
    check_free(path)
    for inner in run.fits:
        check_free(inner.path)


def delete_run(run: Path) -> list[Path]:
    """Delete the files that finetune wrote in the folder of a run, and return the others, which stay.

    Raises:
        ValueError: A process writes the run.
    """
    kept = []
    with holding(run):
        # without its record it is no run, and without the lock another process could continue it meanwhile
        last = [run / RECORD, run / LOCK]
        for folder, folders, names in os.walk(run, topdown=False):
            paths = [Path(folder, name) for name in names]
            paths += [path for name in folders if (path := Path(folder, name)).is_symlink()]
            for path in paths:
                if not _OURS.fullmatch(path.relative_to(run).as_posix()):
                    kept.append(path)
                elif path not in last:
                    path.unlink()
            if Path(folder) != run:
                with suppress(OSError):  # it has a file that is kept
                    os.rmdir(folder)
        for path in last:
            path.unlink()
    with suppress(OSError):
        run.rmdir()
    return sorted(kept)


def drop_last(run: RunDir) -> int:
    """Delete what only resuming needs: last.ckpt, and the optimizer's state in best.ckpt.

    Nothing is deleted if the run has no best.ckpt.

    Returns:
        The number of bytes that this freed.

    Raises:
        ValueError: Another process writes the run.
    """
    # Imported here, since it imports torch, which takes seconds.
    from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint

    best = run.checkpoint("best")
    last = run.checkpoint("last")
    if not run.has("best"):
        return 0
    before = size_of([best, last])
    with holding(run.path):
        checkpoint = read_checkpoint(best)
        kept = {name: part for name, part in checkpoint.items() if name not in _TRAINING_STATE}
        if len(kept) < len(checkpoint):
            AtomicCheckpointIO().save_checkpoint(kept, best)
        last.unlink(missing_ok=True)
    return before - size_of([best])
