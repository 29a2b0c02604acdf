"""The folder of a run and `run.json`, its record. Nothing here imports torch or reads a checkpoint."""

import datetime
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from finetune import __version__
from finetune.runs.headline import Best, Count, Headline
from finetune.runs.page_facts import Corrections, Finding, Ranking
from finetune.runs.run_lock import is_held
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage, reason, shown

RECORD = "run.json"
State = Literal["running", "finished", "unfinished", "no checkpoint", "damaged"]

_MARK = "finetune"  # the key with the version that began the run
_DEPTH = 6  # levels of folders below the one that is searched
# Threads of one process change records one after another. Other processes do not: one process writes a run.
_updating = threading.Lock()


_NumFits = Annotated[int, Meta(ge=1, le=1000)]  # far above those of any command


class _Identity(TypedDict, total=False):
    folds: _NumFits | None
    members: _NumFits | None


class _Split(TypedDict):
    origin: NotRequired[str]
    counts: dict[str, Count]
    num_images: NotRequired[Count]


class Facts(TypedDict, total=False):
    """The content of run.json as far as commands and pages compute with it.

    Attributes:
        kind: The command that makes the run: `fit`, `test`, `validate` or `predict`.
        command: The command line that began it.
        began: The time at which it began.
        ended: The time at which its test and its report were complete.
        folder: The working directory of the command.
        data: The folder or the table of images, as the user named it; None for that of the data class.
        root: The folder of images.
        network: The backbone.
        identity: The data and the network of a fit.
        went_on_by: The command lines that continued it.
        fingerprint: That of the images.
        began_from: The checkpoint of another run that training started from.
        licence_of_the_weights: What training started from, and its licence.
        splits: The number of images of each class, by split.
        first_look: What was found before training.
        backbone_ranking: The networks of `--model.backbone auto`.
        corrections: What a file of corrections has changed.
        lines: The data, the network and the device in words.
        doubts: Why its result may be unreliable.
        seconds: The time of each phase.
        epochs: Number of epochs that have ended.
        loggers: The ID under which each logger logs the run.
        best: The weights of best.ckpt and their validation. It is written after that file, and removed before another
            one is written. A run that was killed in between has no value.
        test: The result of the test, written after test.json.
    """

    kind: str
    command: str
    began: str
    ended: str
    folder: str
    data: str | None
    root: str | None
    network: str
    identity: _Identity
    went_on_by: list[str]
    fingerprint: str | None
    began_from: str | None
    licence_of_the_weights: str | None
    splits: dict[str, _Split]
    first_look: list[Finding] | None
    backbone_ranking: Ranking | None
    corrections: Corrections | None
    lines: list[str]
    doubts: list[str]
    seconds: dict[str, Annotated[float, Meta(ge=0, le=1e10)]]
    epochs: Count
    loggers: dict[str, str]
    best: Best
    test: Headline


@dataclass(frozen=True, order=True)
class RunDir:
    """The folder of a run, which is a folder with a run.json.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """The folder's name. The name of a version has its parent folders as well: `demo/fit/version_0`."""
        parts = self.path.resolve().parts
        return "/".join(parts[-3:] if is_numbered(parts[-1]) else parts[-1:])

    @property
    def is_run(self) -> bool:
        """Whether finetune made the folder. A damaged run.json counts, another tool's does not."""
        try:
            content = _parse(self.path / RECORD)
        except ValueError:
            return True
        return isinstance(content, dict) and _MARK in content

    def facts(self) -> dict[str, Any]:
        """Return the content of run.json; an empty dict if there is none.

        Raises:
            ValueError: It is damaged.
        """
        path = self.path / RECORD
        try:
            content = read_json(path)
            msgspec.convert(content, Facts)
        except msgspec.ValidationError as error:
            fault = f"{path} is damaged: {error}"
        except ValueError as error:
            fault = str(error)
        else:
            return content
        raise ValueError(f"{fault}; restore it, or delete it: its checkpoints remain usable")

    def update(self, **facts: Any) -> None:
        """Write facts to run.json, which is replaced atomically; a fact that is None is removed.

        Raises:
            ValueError: The file is damaged, or would be with these facts. It keeps its content.
            OSError: It cannot be written. It then has its earlier content.
        """
        with _updating:
            before = self.facts()
            after = {**({} if before else {_MARK: __version__}), **before, **facts}
            after = {name: value for name, value in after.items() if value is not None}
            if after != before:
                text = json.dumps(after, indent=2, allow_nan=False)
                msgspec.convert(json.loads(text), Facts)
                replace_text(self.path / RECORD, f"{text}\n")

    def checkpoint(self, name: str) -> Path:
        """Return the path of a checkpoint: `best` or `last`."""
        return self.path / "checkpoints" / f"{name}.ckpt"

    def has(self, name: str) -> bool:
        """Return whether a checkpoint exists."""
        return self.checkpoint(name).is_file()

    @property
    def has_ended(self) -> bool:
        """Whether its training, its test and its report are complete."""
        return "ended" in self.facts()

    @property
    def fits(self) -> list["RunDir"]:
        """The runs of the folds of a cross-validation, or of the members of an ensemble; empty for any other run.

        They are in order, and need not have begun.
        """
        identity = self.facts().get("identity", {})
        name = "fold" if identity.get("members") is None else "member"
        num = identity.get("folds") or identity.get("members") or 0
        return [RunDir(self.path / "fit" / f"{name}_{number}") for number in range(1, num + 1)]

    @property
    def state(self) -> State:
        """What the run is doing, or how it has ended."""
        if is_held(self.path):
            return "running"
        try:
            has_ended = self.has_ended
            has_fits = bool(self.fits)
        except ValueError:
            return "damaged"
        if not self.has("best") and not self.has("last"):
            return "unfinished" if has_fits else "no checkpoint"
        return "finished" if has_ended else "unfinished"

    @property
    def began(self) -> float:
        """When it began, in seconds since 1970; for a damaged record the time of the file."""
        try:
            return datetime.datetime.fromisoformat(self.facts()["began"]).timestamp()
        except (LookupError, ValueError):
            record = self.path / RECORD
        try:
            return record.stat().st_mtime
        except OSError:  # another process has deleted the run
            return 0.0


def result_in(facts: Mapping[str, Any]) -> Headline | None:
    """Return the result in the facts of a run: of its test, or else of best.ckpt on the validation images; or None."""
    if "test" in facts:
        return msgspec.convert(facts["test"], Headline)
    best = best_in(facts)
    return None if best is None else best.result


def best_in(facts: Mapping[str, Any]) -> Best | None:
    """Return the record of best.ckpt in the facts of a run; None without a validation."""
    return msgspec.convert(facts["best"], Best) if "best" in facts else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run; an empty dict if there is no such file.

    Raises:
        ValueError: The file is damaged.
    """
    content = _parse(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    return content


def _parse(path: Path) -> Any:
    """Return the value in a JSON file; an empty dict if there is no such file.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {reason(error)}") from error


def now() -> str:
    """Return the current time as run.json has it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


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


def runs_of(root: str | Path, command: str = "fit") -> list[Path]:
    """Return the runs in `<root>/<command>`, numbered and named ones, oldest first.

    Numbered runs are in the order of their numbers. Named ones are sorted between them by the time of their start.
    """
    try:
        runs = [RunDir(path) for path in Path(root, command).iterdir() if path.is_dir()]
    except OSError:
        return []
    runs = [run for run in runs if run.is_run]
    numbered = [run for run in runs if is_numbered(run.path.name)]
    dated = []
    latest = 0.0
    for run in sorted(numbered, key=lambda run: version_of(run.path)):
        latest = max(latest, run.began)
        dated.append((latest, version_of(run.path), run.path))
    # A copy of a numbered run has the same start time. The original counts as newer.
    dated += [(run.began, -1, run.path) for run in runs if not is_numbered(run.path.name)]
    return [path for *_, path in sorted(dated)]


def find_runs(folder: Path) -> list[RunDir]:
    """Return the runs of `fit` in a folder, or the folder itself if it is one. Links to folders are not followed."""
    return sorted(_find(folder, _DEPTH))


def _find(folder: Path, depth: int) -> Iterator[RunDir]:
    run = RunDir(folder)
    if run.is_run:
        if is_fit(run):
            yield run
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
    try:
        return run.facts().get("kind") == "fit"
    except ValueError:
        return True


def _is_searched(entry: "os.DirEntry[str]") -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
