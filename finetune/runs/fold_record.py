"""folds.json: the record of a cross-validation. Its folder holds a run for each fold, `fit/fold_1` and so on."""

import json
from dataclasses import dataclass
from pathlib import Path

from finetune.runs.run_search import read_about
from finetune.runs.side_files import read_side_file
from finetune.system.files import replace_text

_FILE = "folds.json"


@dataclass(frozen=True)
class FoldRecord:
    """What a cross-validation needs to continue.

    Attributes:
        num_folds: Number of folds.
        flags: The full name and the value of each flag that began it.
        working_dir: The folder to which its paths are relative.
    """

    num_folds: int
    flags: list[tuple[str, str | None]]
    working_dir: str

    def flag(self, name: str) -> str | None:
        """Return the last value of a flag; None if there is none."""
        return next((value for key, value in reversed(self.flags) if key == name), None)


def has_folds(folder: Path) -> bool:
    """Return whether a folder is that of a cross-validation."""
    return (folder / _FILE).is_file()


def write_folds(folder: Path, record: FoldRecord) -> None:
    """Write the record of a cross-validation into its folder."""
    content = {
        "num_folds": record.num_folds,
        "flags": record.flags,
        "working_dir": record.working_dir,
    }
    replace_text(folder / _FILE, json.dumps(content, indent=2) + "\n")


def read_folds(folder: Path) -> FoldRecord:
    """Read the record of a cross-validation.

    Raises:
        ValueError: It is damaged.
    """
    path = folder / _FILE
    content = read_side_file(path)
    try:
        flags = [(name, value) for name, value in content["flags"]]
        return FoldRecord(content["num_folds"], flags, content["working_dir"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def fold_runs(folder: Path, num_folds: int) -> list[Path]:
    """Return the folders of the runs of all folds."""
    return [folder / "fit" / f"fold_{fold}" for fold in range(1, num_folds + 1)]


def has_ended(run: Path) -> bool:
    """Return whether the run of a fold has been tested and has ended."""
    return "ended" in read_about(run) and (run / "test.json").is_file()
