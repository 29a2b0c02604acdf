"""A run is a folder, `<root>/<command>/version_N` or a name, with config, metrics, checkpoints and predictions."""

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from finetune.data.data_place import RUNS_MARK
from finetune.distributed.ranks import ending
from finetune.runs.local_copies import address_of, shown_place
from finetune.runs.removal import delete_run
from finetune.runs.run_dir import RECORD, RunDir, is_numbered, now, version_of, versions
from finetune.runs.run_lock import hold, release_run
from finetune.runs.sync import Sync, names_there, pull_run
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage, reason, shown

# Facts about how a run began. A resumed run does not change them.
_OF_THE_BEGINNING = ("command", "began", "lines", "backbone_ranking")
# Files of a run without a result, next to hidden ones. If a run fails and has no other files, its folder is deleted.
# A best.ckpt without a last.ckpt and logged metrics has the weights before training.
_OF_NO_RESULT = {RECORD, "config.yaml", "report.html", "checkpoints/best.ckpt"}


class Run:
    """The folder of a run.

    Attributes:
        root: The folder of all runs.
        command: The command of the run, such as `fit`.
        path: The run's folder; None until `choose`.
        began_from: The checkpoint of another run that this one started from, if there is one.
        licence: The licence of the weights that it started from, in a sentence.
        beginning: Facts for run.json about how the fit begins or goes on; None if there are none.
        name: The name of its folder; None for the next version_N.
        begins_again: Whether the run of this name ended before its first checkpoint, and is deleted first.
        leaves_folder: Whether the run creates a folder even if no logger needs one.
        sync: Uploads the run on rank 0 if it is in object storage, and else does nothing.
    """

    def __init__(
        self, root: str | Path, command: str, path: Path | None = None, name: str | None = None
    ) -> None:
        self.root = Path(root)
        self.command = command
        self.path = path
        self.began_from: str | None = None
        self.licence: str | None = None
        self.beginning: dict[str, Any] | None = None
        self.name = name
        self.begins_again = False
        self.leaves_folder = True
        self.sync = Sync(None)
        self._made: list[Path] = []  # folders that `choose` has created, the innermost first

    def choose(self) -> Path:
        """Create the run's folder, and return it: the one with its name, or the next version.

        Two runs that start at the same time get different versions.

        Raises:
            WrongUsage: The name is in use.
            OSError: The folder cannot be created; the message names the option or the variable for another one.
        """
        if self.path is not None:
            return self.path
        try:
            self._create()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS, errno.ENOTDIR):
                raise
            option = "--out FILE.csv" if self.command == "predict" else "--out FOLDER"
            if address_of(self.root) is not None:
                option = "FINETUNE_CACHE"
            raise OSError(f"{reason(error)}; {option} writes elsewhere") from error
        assert self.path is not None
        return self.path

    def _create(self) -> None:
        folder = self.root / self.command
        missing = missing_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.name is not None:
            if self.begins_again:
                delete_run(folder / self.name)
            check_unused(folder / self.name)
            (folder / self.name).mkdir(exist_ok=True)
            self.path = folder / self.name
            hold(self.path)
            self._made = [self.path, *missing]
            # a run that was begun on another machine may go on if it has no result there
            if not self._claim(self.path):
                pull_run(self.path)
                if has_result(self.path) or self.dir.has("best"):
                    raise _in_use(self.path)
                self.continue_upload()
        else:
            self._choose_version(folder, missing)
        self.dir.update(kind=self.command, began=now())
        self._mark(missing)

    def _mark(self, missing: Sequence[Path]) -> None:
        """Mark the outermost folder of runs that this command has created, since others may be those of the images.

        In object storage it is the run itself, whose files are uploaded.
        """
        assert self.path is not None
        places = [self.root, self.root / self.command]
        if any((place / RUNS_MARK).exists() for place in places):
            return
        created = [place for place in places if place in missing and address_of(place) is None]
        (next(iter(created), self.path) / RUNS_MARK).touch()

    def _choose_version(self, folder: Path, missing: Sequence[Path]) -> None:
        names = filter(is_numbered, names_there(self.root, self.command))
        existing = [*versions(self.root, self.command), *map(Path, names)]
        number = 1 + max(map(version_of, existing), default=-1)
        while self.path is None:
            candidate = folder / f"version_{number}"
            number += 1
            try:
                candidate.mkdir()
            except FileExistsError:  # another process has created it, or it is a file
                continue
            self._made = [candidate, *missing]
            if self.command == "fit":
                hold(candidate)
            if self._claim(candidate):
                self.path = candidate
            else:
                release_run(candidate)
                shutil.rmtree(candidate)

    def _claim(self, run: Path) -> bool:
        """Return whether a new run is this process's own. In object storage another machine may have begun it."""
        sync = Sync(run)
        is_own = sync.claim()
        if is_own:
            self.sync = sync
        return is_own

    @property
    def place(self) -> str:
        """The run's folder, or its address in object storage."""
        assert self.path is not None, "the run's folder is not chosen yet"
        return shown_place(self.path)

    def continue_upload(self, only_changes: bool = False) -> None:
        """Begin to upload a run that continues in object storage; a process that writes it on another machine ends.

        Args:
            only_changes: Do so only if the local copy has files that were not uploaded.

        Raises:
            ValueError: Another process on this machine writes the run.
            StorageError: The storage cannot be reached.
        """
        sync = Sync(self.path)
        if self.path is not None and sync.is_active and (not only_changes or sync.has_changes()):
            hold(self.path)
            sync.take_over()
            self.sync = sync

    @property
    def dir(self) -> RunDir:
        """The run's folder, which is chosen."""
        assert self.path is not None, "the run's folder is not chosen yet"
        return RunDir(self.path)

    def mark_ended(self) -> None:
        """Write the time of the run's end to run.json, unless it is there already."""
        if not self.dir.has_ended:
            self.dir.update(ended=now())

    def forget_best(self) -> None:
        """Remove the results of best.ckpt, which another one replaces at once."""
        for name in ("test.json", "test_predictions.csv", "test_group_predictions.csv"):
            self.file(name).unlink(missing_ok=True)
        self.dir.update(best=None, test=None, test_by_group=None)

    def discard_if_empty(self) -> None:
        """Delete the folder that this command has created if it contains neither results nor logged metrics."""
        if not self._made or has_result(self._made[0]):
            return
        release_run(self._made[0])
        self.sync.withdraw()
        self.sync = Sync(None)
        shutil.rmtree(self._made[0], ignore_errors=True)
        remove_empty(self._made[1:])

    def file(self, name: str) -> Path:
        return self.dir.path / name

    def checkpoint(self, name: str) -> Path:
        return self.dir.checkpoint(name)


def missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Delete those of the folders that are empty but for the mark of a folder of runs, in this order."""
    for folder in folders:
        with suppress(OSError):  # another run is in it
            if os.listdir(folder) == [RUNS_MARK]:
                (folder / RUNS_MARK).unlink()
            folder.rmdir()


def check_unused(folder: Path) -> None:
    """Check that a new run can use this folder. It may exist with nothing but locks.

    Raises:
        WrongUsage: The name is in use.
    """
    has_only_locks = folder.is_dir() and all(p.name.startswith(".") for p in folder.iterdir())
    if os.path.lexists(folder) and not has_only_locks:
        raise _in_use(folder)


def _in_use(folder: Path) -> WrongUsage:
    return WrongUsage(
        f"--name {folder.name}: {shown_place(folder)} exists already: choose another name, continue that run with "
        f"--resume, or delete it with finetune runs rm {folder}"
    )


def has_result(folder: Path) -> bool:
    """Return whether a run's folder has a file that is more than a record of how the run began."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_file = path.is_symlink() or not path.is_dir()
        is_beginning = path.name.startswith(".") or name in _OF_NO_RESULT
        is_without = name == "steps.csv" and not _has_metrics(path)
        if is_file and not is_beginning and not is_without:
            return True
    return False


def _has_metrics(steps: Path) -> bool:
    """Return whether a steps.csv has more than learning rates."""
    with open(steps, encoding="utf-8") as file:
        columns = file.readline().strip().split(",")
    return any("/" in name and not name.startswith("lr-") for name in columns)


class RunFolder(pl.Callback):
    """Chooses the run's folder on rank 0, broadcasts it, and writes `config.yaml` and `run.json`.

    Args:
        run: The run.
        config: The content of config.yaml.
    """

    def __init__(self, run: Run, config: str) -> None:
        self.run = run
        self.config = config

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        is_new = self.run.path is None or not self.run.file("config.yaml").exists()
        if trainer.is_global_zero and self.run.path is None and self.run.leaves_folder:
            self.run.choose()
        chosen, ckpt_path = trainer.strategy.broadcast((self.run.path, trainer.ckpt_path))
        if self.run.path not in (None, chosen):
            raise RuntimeError(
                f"this process would continue {self.run.path}, rank 0 {chosen}: start them together"
            )
        self.run.path = chosen
        if stage == "fit" and str(ckpt_path) != str(trainer.ckpt_path):
            raise OSError(
                f"this process does not see the runs that rank 0 does: put {self.run.root} on a shared disk"
            )
        if self.run.path is not None and trainer.is_global_zero and (is_new or stage == "fit"):
            began = f"# It began from {shown(self.run.began_from)}\n" if self.run.began_from else ""
            if self.run.beginning is not None:
                self.run.dir.update(**self._facts(self.run.beginning))
            replace_text(self.run.file("config.yaml"), began + self.config)
            self.run.sync.push()

    def on_exception(self, *_: Any) -> None:
        if self.run.command == "fit":  # other commands have nothing left to write
            ending.set()  # before other callbacks and loggers write the rest

    def _facts(self, beginning: dict[str, Any]) -> dict[str, Any]:
        """Return the facts to write. A resumed run keeps how it began, adds its command, and has not ended."""
        first = self.run.dir.facts
        if not first.command:
            return beginning
        kept = {name: getattr(first, name) for name in _OF_THE_BEGINNING}
        went_on_by = [*first.went_on_by, beginning["command"]]
        return {**beginning, **kept, "went_on_by": went_on_by, "ended": None}
