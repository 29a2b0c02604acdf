"""Finds and reads check.json, the result of `finetune check` for the data of a run."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.addresses import joined, real_place
from finetune.runs.record import RunRecord
from finetune.system.messages import WrongUsage, shown


@dataclass(frozen=True)
class DataCheck:
    """The result of `finetune check` for the data folder of a run.

    Attributes:
        path: Path of check.json.
        root: Path of the data folder at that time.
        date: Date of the check.
        network: Description of the network that judged the labels; "" for none.
        num_images: Number of images that were checked.
        findings: The findings in the file, the worst first.
        doubt: Why the check may be of other images than those of the run; "" if there is no doubt.
    """

    path: Path
    root: str
    date: str
    network: str
    num_images: int
    findings: list[dict[str, Any]]
    doubt: str

    @property
    def page(self) -> Path:
        """The page of the check, next to check.json."""
        return self.path.with_suffix(".html")


def data_check(run: RunRecord, path: str | None = None) -> DataCheck | None:
    """Return the check of a run's data: that of a path, or the one in the working directory of the run.

    Args:
        run: The content of the run's folder.
        path: Path of a check.json, or of its folder.

    Returns:
        The check; None if there is no path and the working directory has no check of this data.

    Raises:
        WrongUsage: The file at the path is missing, damaged, or of other images.
    """
    if path is None:
        # The default output of `finetune check`.
        default = Path(run.about.get("folder", ""), "check.json")
        try:
            return _read(run, default) if "folder" in run.about and default.is_file() else None
        except WrongUsage:  # it may be any file of that name
            return None
    if "splits" not in run.about:
        raise WrongUsage(f"--check: {shown(run.path)} has no about.json, which lists its images")
    if Path(path).is_dir():
        path = str(Path(path, "check.json"))
    if not Path(path).is_file():
        raise WrongUsage(
            f"--check: no file {shown(path)}: `finetune check FOLDER --out X` writes X/check.json"
        )
    return _read(run, Path(path))


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
        root = str(content["root"])
        num = int(content["num_pictures"])
        date = str(content["date"])
        network = str(content["network"])
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        details = f"{type(error).__name__}: {error}"
        raise WrongUsage(
            f"{shown(path)} is not a check.json of this version of `finetune check` ({details})"
        ) from error
    return DataCheck(
        path=path,
        root=root,
        date=date,
        network=network,
        num_images=num,
        findings=findings,
        doubt=_doubt(run, root, +totals, path),
    )


def _doubt(run: RunRecord, root: str, totals: Counter[str], path: Path) -> str:
    """Return why a check may be of other images than those of the run; "" if there is no doubt.

    Raises:
        WrongUsage: The check is certainly of other images.
    """
    own: Counter[str] = Counter()
    for split in run.about.get("splits", {}).values():
        own.update(split["counts"])
    own = +own
    read = joined(run.about.get("folder", ""), run.about.get("root", ""))
    is_same_folder = real_place(read) == real_place(root)
    if own == totals:
        return (
            "" if is_same_folder else f"It was in {root} then, with as many images of each class."
        )
    if not is_same_folder:
        raise WrongUsage(
            f"{shown(path)} is of {shown(root)}, the run has read {shown(read)}: check that folder"
        )
    return (
        f"It found {sum(totals.values()):,} images there, and this run has read {sum(own.values()):,}: "
        "some were added, removed or skipped in between."
    )
