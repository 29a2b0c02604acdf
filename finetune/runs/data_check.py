"""What `finetune check` said of the pictures of a run: check.json, found and read back."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.runs.record import RunRecord
from finetune.system.messages import WrongUsage, shown


@dataclass(frozen=True)
class DataCheck:
    """A check of the folder that a run has read.

    Attributes:
        path: check.json.
        root: The folder, as it was called then.
        date: When it was looked at.
        network: What has looked at the labels, in words; "" for nothing.
        num_pictures: How many were looked at.
        findings: As `check` has written them, the worst first.
        doubt: Why it may be of other pictures than the run's, "" where nothing says so.
    """

    path: Path
    root: str
    date: str
    network: str
    num_pictures: int
    findings: list[dict[str, Any]]
    doubt: str

    @property
    def page(self) -> Path:
        """The page that `check` writes beside it."""
        return self.path.with_suffix(".html")


def data_check(run: RunRecord, given: str | None = None) -> DataCheck | None:
    """Return the check of a run's pictures: the one that is given, or that where the run was begun; None for none.

    Args:
        run: What the folder holds.
        given: Path of a check.json.

    Raises:
        WrongUsage: What is given is not there, damaged, or of other pictures.
    """
    if given is None:
        # where `check` writes if it is not told otherwise
        path = Path(run.about.get("folder", ""), "check.json")
        try:
            return _read(run, path) if "folder" in run.about and path.is_file() else None
        except WrongUsage:  # nobody has named it: it may be anything
            return None
    if "splits" not in run.about:
        raise WrongUsage(
            f"--check: {shown(run.path)} has no about.json, which says what pictures it is of"
        )
    if Path(given).is_dir():
        given = str(Path(given, "check.json"))
    if not Path(given).is_file():
        raise WrongUsage(
            f"--check: no file {shown(given)}: `finetune check FOLDER --output X` writes X/check.json"
        )
    return _read(run, Path(given))


def _read(run: RunRecord, path: Path) -> DataCheck:
    try:
        content = json.loads(path.read_text("utf-8"))
        totals: Counter[str] = Counter()
        for counts in content["counts"].values():
            totals.update(dict(zip(content["classes"], counts, strict=True)))
        findings = [
            {
                **{name: str(finding[name]) for name in ("kind", "level", "title")},
                "is_judged": bool(finding["is_judged"]),
                "rows": [
                    {"files": [*map(str, row["files"])], "note": str(row["note"])}
                    for row in finding["rows"]
                ],
            }
            for finding in content["findings"]
        ]
        root, num = str(content["root"]), int(content["num_pictures"])
        date, network = str(content["date"]), str(content["network"])
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        told = f"{type(error).__name__}: {error}"
        raise WrongUsage(
            f"{shown(path)} is no check.json of this version of `finetune check` ({told})"
        ) from error
    return DataCheck(path, root, date, network, num, findings, _doubt(run, root, +totals, path))


def _doubt(run: RunRecord, root: str, totals: Counter[str], path: Path) -> str:
    """Return what speaks against its being of the run's pictures; a sure sign is an error."""
    own: Counter[str] = Counter()
    for split in run.about.get("splits", {}).values():
        own.update(split["counts"])
    own = +own
    read = os.path.join(run.about.get("folder", ""), run.about.get("root", ""))
    is_same_folder = os.path.realpath(read) == os.path.realpath(root)
    if own == totals:
        return (
            "" if is_same_folder else f"It lay in {root} then, with as many pictures of each class."
        )
    if not is_same_folder:
        raise WrongUsage(
            f"{shown(path)} is of {shown(root)}, the run has read {shown(read)}: check that folder"
        )
    return (
        f"It found {sum(totals.values()):,} pictures there, this run has read {sum(own.values()):,}: "
        "some were added or removed in between, or left out."
    )
