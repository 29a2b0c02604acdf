"""A run is a folder: `<root>/<command>/version_N` with config, metrics, checkpoints, results and predictions."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser, Namespace

from finetune.distributed.ranks import ending
from finetune.runs.run_lock import hold
from finetune.runs.side_files import continue_side_file, is_about
from finetune.system.files import replace_text
from finetune.system.messages import shown

# what about.json keeps when a run goes on
_OF_THE_BEGINNING = ("command", "lines", "backbone_ranking")


class Run:
    """Where this run's files go.

    Attributes:
        path: The run's folder; None until `choose`.
        began_from: The checkpoint of another run that this one went on from, if it did.
        licence: Whose terms hold for the weights that it began with, in a sentence.
        about: What a fit began with, for about.json; None where nothing is known of it.
    """

    def __init__(self, root: str | Path, command: str, path: Path | None = None) -> None:
        self.root = Path(root)
        self.command = command
        self.path = path
        self.began_from: str | None = None
        self.licence: str | None = None
        self.about: dict[str, Any] | None = None

    def choose(self) -> Path:
        """Make a new version of the folder; two runs that begin at once get one each."""
        folder = self.root / self.command
        folder.mkdir(parents=True, exist_ok=True)
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
        return self.path

    def file(self, name: str) -> Path:
        assert self.path is not None, "the run's folder is not chosen yet"
        return self.path / name

    def checkpoint(self, name: str) -> Path:
        return self.file("checkpoints") / f"{name}.ckpt"


def versions(root: str | Path, command: str) -> list[Path]:
    """Return the runs of `command` beneath `root`, oldest first."""
    folders = Path(root, command).glob("version_*")
    return sorted(
        (f for f in folders if f.is_dir() and re.fullmatch(r"version_\d+", f.name)), key=_version
    )


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
    """Return the runs beneath `root` that have a `last.ckpt` but another name, where `--resume` does not look.

    Args:
        root: The folder of all runs.
        known: Its `versions` of `fit`.
    """
    found = [
        path.parent.parent
        for depth in ("*", "*/*")
        for path in Path(root).glob(f"{depth}/checkpoints/last.ckpt")
    ]
    return sorted(set(found) - set(known))


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
        if trainer.is_global_zero and self.run.path is None:
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
        if trainer.is_global_zero and (is_new or stage == "fit"):
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
        kept = {"command": ""} | {
            name: first[name] for name in ("command", "lines", "backbone_ranking") if name in first
        }
        return (
            about | kept | {"went_on_by": [*first.get("went_on_by", []), about.get("command", "")]}
        )

    def text(self) -> str:
        """Return what goes into config.yaml."""
        return config_text(self.parser, self.config, self.run.command)


def config_text(parser: ArgumentParser, config: Namespace, command: str) -> str:
    """Return the settings of a command as config.yaml has them; given to `fit` again, they start a run of its own."""
    config = config.clone()
    for key, value in {"resume": False, "allow_changes": False, "ckpt_path": None}.items():
        if command == "fit" and key in config:
            config[key] = value
    return parser.dump(config, skip_unset=False, format="yaml")
