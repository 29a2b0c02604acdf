"""A run is a folder, `<root>/<command>/version_N` or a name, with config, metrics, checkpoints and predictions."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser, Namespace

from finetune.distributed.ranks import ending
from finetune.runs.run_lock import check_free, hold, release_run
from finetune.runs.run_search import is_numbered, now, read_about
from finetune.runs.side_files import continue_side_file, is_about
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage, shown

# what about.json keeps when a run goes on
_OF_THE_BEGINNING = ("command", "began", "lines", "backbone_ranking")
# What a run has before it has a result: a run that fails leaves no folder with nothing else.
_OF_NO_RESULT = {
    "config.yaml",
    "about.json",
    "seconds.json",
    "loggers.json",
    "report.html",
    ".lock",
}
_OF_NO_RESULT |= {"checkpoints/start.ckpt"}


class Run:
    """Where this run's files go.

    Attributes:
        path: The run's folder; None until `choose`.
        began_from: The checkpoint of another run that this one went on from, if it did.
        licence: Whose terms hold for the weights that it began with, in a sentence.
        about: What a fit began with, for about.json; None where nothing is known of it.
        name: The name of its folder; None for the next version_N.
        leaves_folder: Whether it makes a folder without being asked for it by a logger.
    """

    def __init__(
        self, root: str | Path, command: str, path: Path | None = None, name: str | None = None
    ) -> None:
        self.root = Path(root)
        self.command = command
        self.path = path
        self.began_from: str | None = None
        self.licence: str | None = None
        self.about: dict[str, Any] | None = None
        self.name = name
        self.leaves_folder = True
        self._made: list[Path] = []  # by `choose`, the innermost folder first

    def choose(self) -> Path:
        """Make the run's folder: the one with its name, or a new version; two runs that begin at once get one each.

        Raises:
            WrongUsage: There is something with its name.
        """
        if self.path is not None:
            return self.path
        folder = self.root / self.command
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if self.name is not None:
            check_unused(folder / self.name)
            (folder / self.name).mkdir(exist_ok=True)
            self.path = folder / self.name
            hold(self.path)
        self._choose_version(folder)
        assert self.path is not None
        self._made = [self.path, *missing]
        return self.path

    def _choose_version(self, folder: Path) -> None:
        number = 1 + max(map(_version, versions(self.root, self.command)), default=-1)
        while self.path is None:
            candidate = folder / f"version_{number}"
            try:
                candidate.mkdir()
                self.path = candidate
                if self.command == "fit":
                    hold(candidate)
            except FileExistsError:  # of another process, or what is no folder
                number += 1

    def mark_ended(self) -> None:
        """Write into about.json when the run ended, if it did not say so before."""
        about = {} if self.path is None else read_about(self.path)
        if about and "ended" not in about:
            text = json.dumps(about | {"ended": now()}, indent=2)
            replace_text(self.file("about.json"), text + "\n")

    def discard_if_empty(self) -> None:
        """Delete the folder that this command has made if there is no result in it, nor a line of a log."""
        if not self._made or has_result(self._made[0]):
            return
        release_run(self._made[0])
        shutil.rmtree(self._made[0], ignore_errors=True)
        for parent in self._made[1:]:
            with suppress(OSError):  # another run is in it
                parent.rmdir()

    def file(self, name: str) -> Path:
        assert self.path is not None, "the run's folder is not chosen yet"
        return self.path / name

    def checkpoint(self, name: str) -> Path:
        return self.file("checkpoints") / f"{name}.ckpt"


def versions(root: str | Path, command: str) -> list[Path]:
    """Return the numbered runs of `command` beneath `root`, oldest first."""
    folders = Path(root, command).glob("version_*")
    return sorted((f for f in folders if f.is_dir() and is_numbered(f.name)), key=_version)


def last_checkpoint(run: Path) -> Path:
    """Return where a run writes the checkpoint from which `--resume` continues."""
    return run / "checkpoints" / "last.ckpt"


def is_try(run: Path) -> bool:
    """Return whether a run was one of `--trainer.fast_dev_run`; killed, it leaves a checkpoint."""
    try:
        return bool(
            yaml.safe_load((run / "config.yaml").read_text("utf-8"))["trainer"]["fast_dev_run"]
        )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        yaml.YAMLError,
    ):  # it ended before, or is of another version
        return False


def not_looked_at(root: str | Path, known: Sequence[Path]) -> list[Path]:
    """Return the runs beneath `root` that have a `last.ckpt` but lie where `--resume` does not look.

    Args:
        root: The folder of all runs.
        known: Its runs of `fit`.
    """
    found = [
        path.parent.parent
        for depth in ("*", "*/*")
        for path in Path(root).glob(f"{depth}/checkpoints/last.ckpt")
    ]
    return sorted(set(found) - set(known))


def check_unused(folder: Path) -> None:
    """Make sure that a new run can have this folder: a fit that was killed before it had a result may have left it.

    Raises:
        WrongUsage: There is something else of that name.
        ValueError: Another process is about to train there.
    """
    if folder.is_dir() and not folder.is_symlink() and not has_result(folder):
        check_free(folder)
    elif os.path.lexists(folder):
        can_go_on = last_checkpoint(folder).is_file()
        hint = "continue that run with --resume" if can_go_on else f"finetune runs rm {folder}"
        raise WrongUsage(
            f"--name {folder.name}: {folder} exists already: choose another name, or {hint}"
        )


def check_name(name: str) -> None:
    """Make sure that a run can have this name: one component of a path, that `version_N` and flags cannot be.

    Raises:
        WrongUsage: It cannot.
    """
    is_plain = name == shown(name).strip() and not re.search(r"[/\\]", name) and len(name) <= 100
    if not name or not is_plain or name[0] in ".-":
        raise WrongUsage(
            f"--name {name!r} must be a plain folder name: no slashes, not more than 100 characters, no dot, dash or "
            "space in front"
        )
    if is_numbered(name):
        raise WrongUsage(f"--name {name}: runs without a name are called so; choose another")


def has_result(folder: Path) -> bool:
    """Return whether a run's folder has a file that is more than a record of how the run began."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder or name in _OF_NO_RESULT or (name == "steps.csv" and not _has_metrics(path)):
            continue
        return True
    return False


def _has_metrics(steps: Path) -> bool:
    """Return whether a steps.csv has more than learning rates."""
    with open(steps, encoding="utf-8") as file:
        columns = file.readline().strip().split(",")
    return any("/" in name and not name.startswith("lr-") for name in columns)


def _version(folder: Path) -> int:
    return int(folder.name.removeprefix("version_"))


class RunFolder(pl.Callback):
    """Lets rank 0 choose the run's folder, hands it to the others, and writes `config.yaml` and `about.json`."""

    def __init__(self, run: Run, parser: ArgumentParser, config: Namespace) -> None:
        self.run = run
        self.parser = parser
        self.config = config

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        is_new = self.run.path is None or not self.run.file("config.yaml").exists()
        if trainer.is_global_zero and self.run.path is None and self.run.leaves_folder:
            self.run.choose()
        chosen, ckpt_path = trainer.strategy.broadcast((self.run.path, trainer.ckpt_path))
        if self.run.path not in (None, chosen):
            raise RuntimeError(
                f"this process would go on in {self.run.path}, rank 0 in {chosen}: start them together"
            )
        self.run.path = chosen
        if stage == "fit" and str(ckpt_path) != str(trainer.ckpt_path):
            raise OSError(
                f"this process does not see the runs that rank 0 does: put {self.run.root} on a shared disk"
            )
        if self.run.path is not None and trainer.is_global_zero and (is_new or stage == "fit"):
            began = f"# It began from {shown(self.run.began_from)}\n" if self.run.began_from else ""
            replace_text(self.run.file("config.yaml"), began + self.text())
            if self.run.about is not None:
                replace_text(
                    self.run.file("about.json"),
                    json.dumps(self._about(self.run.about), indent=2) + "\n",
                )

    def on_exception(self, *_: Any) -> None:
        if self.run.command == "fit":  # others leave nothing to write
            ending.set()  # before other callbacks, and loggers, write what is left

    def _about(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return what goes into about.json: how a run began stays in it, and each command that went on with it."""
        path = self.run.file("about.json")
        if not path.exists():
            return about
        first = continue_side_file(path, is_about, "the command that began the run is lost")
        kept = {"command": ""} | {name: first[name] for name in _OF_THE_BEGINNING if name in first}
        went_on_by = [*first.get("went_on_by", []), about.get("command", "")]
        now = {name: value for name, value in about.items() if name != "began"}
        return now | kept | {"went_on_by": went_on_by}

    def text(self) -> str:
        """Return what goes into config.yaml."""
        return config_text(self.parser, self.config, self.run.command)


def config_text(parser: ArgumentParser, config: Namespace, command: str) -> str:
    """Return the settings of a command as config.yaml has them; given to `fit` again, they start a run of its own."""
    config = config.clone()
    for key, value in {
        "resume": False,
        "allow_changes": False,
        "ckpt_path": None,
        "name": None,
    }.items():
        if command == "fit" and key in config:
            config[key] = value
    return parser.dump(config, skip_unset=False, format="yaml")
