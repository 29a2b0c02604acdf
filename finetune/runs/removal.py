"""Delete a run, or the part of a finished run that only resuming needs."""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from finetune.runs.fold_record import has_folds
from finetune.runs.run_lock import check_free, holding
from finetune.runs.run_search import is_run_folder
from finetune.runs.run_table import FINISHED, TRIAL, read_row, size_of
from finetune.system.messages import NotFound, WrongUsage

# What training writes next to the weights, and only resuming reads.
_TRAINING_STATE = ("optimizer_states", "lr_schedulers")
# Files by which a run is recognised. They are deleted last.
_IDENTITY = ("config.yaml", "about.json", ".lock")


@dataclass(frozen=True)
class Removal:
    """A planned deletion of a run, or of a part of it.

    Attributes:
        run: The run's folder.
        text: What is deleted, in words.
        num_bytes: Bytes that this frees.
        only_last: Whether only the files for resuming are deleted; the run and its best.ckpt remain.
        has_any: Whether there is something to delete.
    """

    run: Path
    text: str
    num_bytes: int
    only_last: bool
    has_any: bool = True

    def execute(self) -> int:
        """Delete the run or the part, and return the number of bytes that this freed.

        Raises:
            ValueError: A process writes the run.
        """
        if self.only_last:
            return drop_last(self.run) if self.has_any else 0
        delete_run(self.run)
        return self.num_bytes


def plan_removal(run: Path, only_last: bool = False) -> Removal:
    """Return what would be deleted of a run; nothing is changed.

    Args:
        run: The run's folder.
        only_last: Whether to delete only what resuming needs.

    Raises:
        WrongUsage: The folder is not that of a run, or has links that lead out of it. Or, with `only_last`, the run
            is not finished or has no best.ckpt. Or, without, it is a part of a cross-validation.
        ValueError: A process writes the run.
    """
    _check_is_run(run)
    check_free(run)
    if not only_last:
        _check_is_no_part(run)
        num_files = sum(len(names) for _, _, names in os.walk(run))
        return Removal(run, f"the run, {num_files} files", size_of([run]), only_last=False)
    state = read_row(run).state
    if state not in (FINISHED, TRIAL):
        has_last = (run / "checkpoints" / "last.ckpt").is_file()
        why = f": finetune fit --resume {run} needs its last.ckpt" if has_last else ""
        raise WrongUsage(f"{run} is {state}, not finished{why}")
    if not _best(run).is_file():
        raise WrongUsage(f"{run} has no best.ckpt: nothing would be left to use")
    names = [file.name for file in _only_for_resuming(run) if file.is_file()]
    share = training_state_size(run)
    if share:
        names.append("the optimizer state in best.ckpt")
    if not names:
        return Removal(run, "nothing to remove", 0, True, has_any=False)
    num_bytes = _checkpoint_size(run) - _best(run).stat().st_size
    return Removal(run, " and ".join(names), num_bytes + share, only_last=True)


def _check_is_no_part(run: Path) -> None:
    """Refuse to delete a fold of a cross-validation, or the test of its networks.

    Raises:
        WrongUsage: The run is a part of a cross-validation.
    """
    cross_validation = next((folder for folder in run.resolve().parents if has_folds(folder)), None)
    if cross_validation is not None:
        raise WrongUsage(
            f"{run} is a part of the cross-validation {cross_validation}, which cannot be reported or resumed without "
            f"it: delete the cross-validation with finetune runs rm {shlex.quote(str(cross_validation))}"
        )


def delete_run(run: Path) -> None:
    """Delete a run's folder.

    Raises:
        ValueError: A process writes the run.
    """
    with holding(run):
        for entry in list(os.scandir(run)):
            if entry.name in _IDENTITY:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        shutil.rmtree(run)


def drop_last(run: Path) -> int:
    """Delete what only resuming needs: last.ckpt, start.ckpt, and the optimizer's state in best.ckpt.

    Nothing is deleted if the run has no best.ckpt.

    Returns:
        The number of bytes that this freed.

    Raises:
        ValueError: Another process writes the run.
    """
    if not _best(run).is_file():
        return 0
    before = _checkpoint_size(run)
    with holding(run):
        _strip(_best(run))
        for file in _only_for_resuming(run):
            file.unlink(missing_ok=True)
    return before - _checkpoint_size(run)


def training_state_size(run: Path) -> int:
    """Return the bytes of the optimizer's state in a run's best.ckpt; 0 without one."""
    # Imported here, since it imports torch, which takes seconds.
    from finetune.runs.checkpoint_parts import tensor_bytes

    return tensor_bytes(_best(run), _TRAINING_STATE)


def _strip(path: Path) -> None:
    from finetune.runs.checkpoint_parts import drop_parts

    drop_parts(path, _TRAINING_STATE)


def _checkpoint_size(run: Path) -> int:
    """Return the bytes of a run's own checkpoints; one with two names counts once."""
    files = [_best(run), *_only_for_resuming(run)]
    statuses = [file.stat() for file in files if file.is_file()]
    return sum({(s.st_dev, s.st_ino): s.st_size for s in statuses}.values())


def _best(run: Path) -> Path:
    return run / "checkpoints" / "best.ckpt"


def _only_for_resuming(run: Path) -> list[Path]:
    return [run / "checkpoints" / name for name in ("last.ckpt", "start.ckpt")]


def _check_is_run(run: Path) -> None:
    if run.is_symlink():
        raise WrongUsage(f"{run} is a symbolic link: name the folder it points to, {run.resolve()}")
    if not run.exists():
        raise NotFound(f"there is no run {run}")
    if not is_run_folder(run):
        raise WrongUsage(f"{run} is not the folder of a run: nothing is deleted")
    inside = run.resolve()
    for folder, folders, files in os.walk(run):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise WrongUsage(
                    f"{path} is a symbolic link that leads out of the run, to {path.resolve()}: delete the link first"
                )
