"""Delete the files of a run, or those that only resuming needs."""

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from finetune.runs.identity import num_folds
from finetune.runs.run_lock import check_free, holding
from finetune.runs.run_search import is_run_folder
from finetune.system.messages import NotFound, WrongUsage

# What training writes next to the weights, and only resuming reads.
_TRAINING_STATE = ("optimizer_states", "lr_schedulers")
# The files that a fit, its loggers and `finetune export` write in the folder of a run; with folds also beneath it.
_OURS = re.compile(
    r"(fit/fold_\d+/|test/version_\d+/)?"
    r"((about|kept_weights|loggers|seconds|test|val)\.json|config\.yaml|skipped\.txt"
    r"|(metrics|steps|predictions|test_predictions)\.csv|report\.html|augmented\.webp"
    r"|\.finetune|\.lock|\.children\.lock|\.sync|\.uploaded\.json"
    r"|checkpoints/(best|last|start)(\.ckpt|(\.int8)?\.(onnx|safetensors)(\.json)?)"
    r"|checkpoints/(best|last|start)\.timm/(README\.md|(config|finetune)\.json|model\.safetensors)"
    r"|(checkpoints/((best|last|start)\.timm/)?)?\.[^/]+\.[0-9a-f]{8}\.tmp|checkpoints/\.[^/]+\.lock"
    r"|(mlflow|tensorboard|wandb)/.+)"
    r"|(fit|test)/\.finetune",
    re.DOTALL,
)


def check_removable(run: Path) -> None:
    """Make sure that a folder is a run that may be deleted.

    Raises:
        WrongUsage: `fit` did not write it, it is a part of a cross-validation, or it contains another run.
        ValueError: A process writes it.
    """
    if not run.exists():
        raise NotFound(f"there is no run {run}")
    if run.is_symlink() or not is_run_folder(run):
        raise WrongUsage(f"{run} is not the folder of a run of finetune fit: nothing is deleted")
    whole = next(filter(num_folds, run.resolve().parents), None)
    if whole is not None:
        raise WrongUsage(
            f"{run} is a part of a cross-validation: finetune runs rm {shlex.quote(str(whole))}"
        )
    check_free(run)
    for inner in sorted(path.parent for path in run.glob("*/**/about.json")):
        if num_folds(run) and re.fullmatch(r"fit/fold_\d+", inner.relative_to(run).as_posix()):
            check_free(inner)
        elif is_run_folder(inner):
            raise WrongUsage(
                f"{run} contains another run: finetune runs rm {shlex.quote(str(inner))}"
            )


def delete_run(run: Path) -> list[Path]:
    """Delete the files that finetune wrote in the folder of a run, and return the others, which stay.

    Raises:
        ValueError: A process writes the run.
    """
    kept = []
    with holding(run):
        about = run / "about.json"  # by which the run is recognised: deleted last
        for folder, folders, names in os.walk(run, topdown=False):
            paths = [Path(folder, name) for name in names]
            paths += [path for name in folders if (path := Path(folder, name)).is_symlink()]
            for path in paths:
                if not _OURS.fullmatch(path.relative_to(run).as_posix()):
                    kept.append(path)
                elif path != about:
                    path.unlink()
            if Path(folder) != run:
                with suppress(OSError):  # it has a file that is kept
                    os.rmdir(folder)
        about.unlink()
    with suppress(OSError):
        run.rmdir()
    return sorted(kept)


def drop_last(run: Path) -> int:
    """Delete what only resuming needs: last.ckpt, start.ckpt, and the optimizer's state in best.ckpt.

    Nothing is deleted if the run has no best.ckpt.

    Returns:
        The number of bytes that this freed.

    Raises:
        ValueError: Another process writes the run.
    """
    # Imported here, since it imports torch, which takes seconds.
    from finetune.runs.checkpoint_parts import drop_parts

    folder = run / "checkpoints"
    best = folder / "best.ckpt"
    last = folder / "last.ckpt"
    start = folder / "start.ckpt"
    if not best.is_file():
        return 0
    before = _size([best, last, start])
    with holding(run):
        drop_parts(best, _TRAINING_STATE)
        last.unlink(missing_ok=True)
        start.unlink(missing_ok=True)
    return before - _size([best])


def _size(files: list[Path]) -> int:
    """Return the bytes of those files that exist; one with two names counts once."""
    statuses = [file.stat() for file in files if file.is_file()]
    return sum({(s.st_dev, s.st_ino): s.st_size for s in statuses}.values())
