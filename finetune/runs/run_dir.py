"""The folder of a run and `run.json`, its record. Nothing here imports torch or reads a checkpoint."""

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from finetune import __version__
from finetune.runs.facts import Facts
from finetune.runs.run_lock import is_held
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage, reason, shown

RECORD = "run.json"
State = Literal["running", "finished", "unfinished", "no checkpoint", "damaged"]

_DEPTH = 6  # levels of folders below the one that is searched
# Threads of one process change records one after another. Other processes do not: one process writes a run.
_updating = threading.Lock()


class _Record(NamedTuple):
    """A run.json as it was read.

    Attributes:
        facts: Its content; of a damaged file none.
        damage: What is wrong with it; "" for nothing.
        is_ours: Whether finetune wrote it. A damaged file counts, another tool's does not.
    """

    facts: Facts
    damage: str = ""
    is_ours: bool = True


@dataclass(frozen=True, order=True)
class RunDir:
    """The folder of a run, which is a folder with a run.json. That file is read once, when it is first needed.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """The folder's name. The name of a version has its parent folders as well: `demo/fit/version_0`."""
        parts = self.path.resolve().parts
        return "/".join(parts[-3:] if is_numbered(parts[-1]) else parts[-1:])

    @cached_property
    def _record(self) -> _Record:
        try:
            content = json.loads((self.path / RECORD).read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return _Record(Facts(), is_ours=False)
        except (OSError, ValueError, RecursionError) as error:
            return _Record(Facts(), reason(error))
        is_ours = isinstance(content, dict) and "finetune" in content
        try:
            facts = msgspec.convert(content, Facts)
        except msgspec.ValidationError as error:
            return _Record(Facts(), str(error), is_ours)
        return _Record(facts, "" if is_ours else "finetune did not write it", is_ours)

    @property
    def is_run(self) -> bool:
        """Whether finetune made the folder. A damaged run.json counts, another tool's does not."""
        return self._record.is_ours

    @property
    def damage(self) -> str:
        """What is wrong with run.json, in a sentence; "" for nothing."""
        if not self._record.damage:
            return ""
        path = self.path / RECORD
        remedy = "restore it, or delete it: its checkpoints remain usable"
        return f"{path} is damaged: {self._record.damage}; {remedy}"

    @property
    def facts(self) -> Facts:
        """The content of run.json; without such a file there are no facts.

        Raises:
            ValueError: It is damaged.
        """
        if self.damage:
            raise ValueError(self.damage)
        return self._record.facts

    def update(self, **facts: Any) -> None:
        """Write facts to run.json, which is replaced atomically; a fact that is None is removed.

        The facts are merged with those that the file has now, and are those of this object from now on.

        Raises:
            ValueError: The file is damaged, or would be with these facts. It keeps its content.
            OSError: It cannot be written. It then has its earlier content.
        """
        with _updating:
            before = RunDir(self.path).facts
            merged = {"finetune": __version__, **msgspec.to_builtins(before)}
            merged |= msgspec.to_builtins(facts, enc_hook=float)
            known = {name: value for name, value in merged.items() if value is not None}
            after = msgspec.convert(known, Facts)
            if after != before:
                text = json.dumps(msgspec.to_builtins(after), indent=2, allow_nan=False)
                replace_text(self.path / RECORD, f"{text}\n")
        self.__dict__["_record"] = _Record(after)

    def checkpoint(self, name: str) -> Path:
        """Return the path of a checkpoint: `best` or `last`."""
        return self.path / "checkpoints" / f"{name}.ckpt"

    def has(self, name: str) -> bool:
        """Return whether a checkpoint exists."""
        return self.checkpoint(name).is_file()

    @property
    def has_ended(self) -> bool:
        """Whether its training, its test and its report are complete."""
        return self.facts.ended is not None

    @property
    def fits(self) -> list["RunDir"]:
        """The runs of the folds of a cross-validation, or of the members of an ensemble; empty for any other run.

        They are in order, and need not have begun.
        """
        identity = self.facts.identity
        if identity is None:
            return []
        name = "fold" if identity.members is None else "member"
        num = identity.folds or identity.members or 0
        return [RunDir(self.path / "fit" / f"{name}_{number}") for number in range(1, num + 1)]

    @property
    def state(self) -> State:
        """What the run is doing, or how it has ended."""
        if is_held(self.path):
            return "running"
        if self.damage:
            return "damaged"
        if not self.has("best") and not self.has("last"):
            return "unfinished" if self.fits else "no checkpoint"
        return "finished" if self.has_ended else "unfinished"

    @property
    def began(self) -> float:
        """When it began, in seconds since 1970; for a damaged record the time of the file."""
        began = None if self.damage else self.facts.began
        if began is not None:
            return began.timestamp()
        try:
            return (self.path / RECORD).stat().st_mtime
        except OSError:  # another process has deleted the run
            return 0.0


@contextmanager
def reading(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise a ValueError that names a file of a run if an error within the context shows that it is damaged.

    Args:
        path: The file, which exists.
        errors: Errors of the parser that are not among Python's own.
    """
    own = (LookupError, TypeError, ValueError, OSError, RecursionError)
    kinds: tuple[type[Exception], ...] = (*own, *errors)
    try:
        yield
    except kinds as error:
        raise ValueError(f"{path} is damaged: {reason(error)}") from error


def now() -> datetime:
    """Return the current time, with the local time zone, for run.json."""
    return datetime.now().astimezone()


def is_numbered(name: str) -> bool:
    """Return whether a folder's name is that of a run without a name of its own."""
    return re.fullmatch(r"version_\d+", name) is not None


def check_name(name: str) -> None:
    """Check that a name is valid for a run: one component of a path that is neither `version_N` nor like a flag.

    Raises:
        WrongUsage: It is not valid.
    """
    is_plain = name == shown(name).strip() and not re.search(r"[/\\]", name) and len(name) <= 100
    if not name or not is_plain or name[0] in ".-":
        raise WrongUsage(
            f"--name {name!r} must be a plain folder name: no slashes, not more than 100 characters, no dot, dash or "
            "space in front"
        )
    if is_numbered(name):
        raise WrongUsage(f"--name {name}: that is a name of runs without --name; choose another")


def versions(root: str | Path, command: str) -> list[Path]:
    """Return the folders of the numbered runs of `command` in `root`, oldest first."""
    folders = Path(root, command).glob("version_*")
    return sorted((f for f in folders if f.is_dir() and is_numbered(f.name)), key=version_of)


def version_of(folder: Path) -> int:
    """Return the number of a numbered run."""
    return int(folder.name.removeprefix("version_"))


def runs_of(root: str | Path) -> list[RunDir]:
    """Return the runs of `fit` in `<root>/fit`, oldest first. A numbered run counts as newer than a copy of it."""
    try:
        folders = [path for path in Path(root, "fit").iterdir() if path.is_dir()]
    except OSError:
        return []

    def age(run: RunDir) -> tuple[float, int]:
        name = run.path.name
        return run.began, version_of(run.path) if is_numbered(name) else -1

    return sorted((run for run in map(RunDir, folders) if run.is_run), key=age)


def find_runs(folder: Path) -> list[RunDir]:
    """Return the runs of `fit` in a folder, or the folder itself if it is one. Links to folders are not followed."""
    return sorted(_find(folder, _DEPTH))


def _find(folder: Path, depth: int) -> Iterator[RunDir]:
    run = RunDir(folder)
    if run.is_run:
        if is_fit(run):
            yield run
        if not run.damage:  # else there may be runs below: it may be a copy of another file
            return
    try:
        with os.scandir(folder) as entries:
            folders = [Path(entry) for entry in entries if _is_searched(entry)]
    except OSError:
        return
    if depth >= 0:
        for path in folders:
            yield from _find(path, depth - 1)


def is_fit(run: RunDir) -> bool:
    """Return whether a run is one of `fit`, or has a damaged record."""
    return bool(run.damage) or run.facts.kind == "fit"


def _is_searched(entry: "os.DirEntry[str]") -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
