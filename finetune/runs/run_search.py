"""Find the folders of runs, numbered and named ones; nothing here imports torch or reads a checkpoint."""

import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.runs.local_copies import local_root
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage

MARK = "finetune"  # key of about.json with the version that wrote a run
_DEPTH = 6  # levels of folders below the one that is searched
# A folder with any of these files is a run that has begun.
_MARKS = ("config.yaml", ".lock", "checkpoints/last.ckpt")


def is_numbered(name: str) -> bool:
    """Return whether a folder's name is that of a run without a name of its own."""
    return re.fullmatch(r"version_\d+", name) is not None


def runs_of(root: str | Path, command: str = "fit") -> list[Path]:
    """Return the runs in `<root>/<command>`, numbered and named ones, oldest first.

    Numbered runs are in the order of their numbers. Named ones are sorted between them by the time of their start.
    """
    try:
        folders = [entry for entry in Path(root, command).iterdir() if _is_run_in_its_place(entry)]
    except OSError:
        return []
    numbered = [folder for folder in folders if is_numbered(folder.name)]
    dated = []
    latest = 0.0
    for folder in sorted(numbered, key=lambda folder: int(folder.name.removeprefix("version_"))):
        latest = max(latest, start_time(folder))
        number = int(folder.name.removeprefix("version_"))
        dated.append((latest, number, folder))
    # A copy of a numbered run has the same start time. The original counts as newer.
    dated += [
        (start_time(folder), -1, folder) for folder in folders if not is_numbered(folder.name)
    ]
    return [folder for *_, folder in sorted(dated)]


def check_is_in(out: str | None, run: Path) -> None:
    """Make sure that a run to continue is in the folder of runs that the command names, if it names one.

    Raises:
        WrongUsage: It is in another one.
    """
    if out is not None and not run.resolve().is_relative_to(local_root(out).resolve()):
        raise WrongUsage(
            f"--resume {run} continues in that folder, which is not in --out {out}: omit --out, or copy the "
            "run there first and resume the copy"
        )


def find_runs(folder: Path) -> list[Path]:
    """Return the runs of `fit` in a folder, or the folder itself if it is one. Links to folders are not followed."""
    if is_run_folder(folder):
        return [folder]
    return sorted(_beneath(folder, _DEPTH))


def is_run_folder(path: Path) -> bool:
    """Return whether `fit` wrote a folder. It may have been moved."""
    return MARK in read_about(path)


def start_time(run: Path) -> float:
    """Return when a run began, in seconds since 1970. If about.json lacks it, that is the time of its oldest file."""
    try:
        return datetime.datetime.fromisoformat(read_about(run)["began"]).timestamp()
    except (LookupError, TypeError, ValueError):
        pass
    times = [0.0]
    try:
        times = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(run)]
        return min(times, default=run.stat().st_mtime)
    except OSError:  # another process is writing or deleting the run
        return times[0]


def now() -> str:
    """Return the current time in the format of about.json."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def read_about(run: Path) -> dict[str, Any]:
    """Return the content of a run's about.json; an empty dict if it cannot be read."""
    try:
        about = json.loads((run / "about.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def write_about(run: Path, about: Mapping[str, Any]) -> None:
    """Write a run's about.json, with the mark of a run."""
    text = json.dumps({MARK: __version__, **about}, indent=2)
    replace_text(run / "about.json", text + "\n")


def has_ended(run: Path) -> bool:
    """Return whether a run's training and test have ended, not been interrupted."""
    return "ended" in read_about(run) or (run / "test.json").is_file()


def _is_run_in_its_place(folder: Path) -> bool:
    """Return whether a folder in `<root>/<command>` is a run: any numbered one, and a named one that has begun."""
    if folder.name.startswith(".") or not folder.is_dir():
        return False
    return is_numbered(folder.name) or any((folder / mark).is_file() for mark in _MARKS)


def _beneath(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            folders = [Path(entry) for entry in entries if _is_searched(entry)]
    except OSError:
        return
    for path in folders:
        is_fit = folder.name == "fit" and _is_run_in_its_place(path)
        if is_fit or (is_run_folder(path) and _has_trained(path)):
            yield path
        elif depth and not is_run_folder(path):
            yield from _beneath(path, depth - 1)


def _is_searched(entry: "os.DirEntry[str]") -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def _has_trained(run: Path) -> bool:
    """Return whether a run that may have been moved is one of `fit`."""
    return (run / "checkpoints").is_dir() or (run / "metrics.csv").is_file()
