"""The data and the network of a run, which it records when it begins, and the run that `--resume` continues by them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from finetune.runs.local_copies import address_of, shown_place
from finetune.runs.run_dir import RunDir, runs_of
from finetune.runs.run_lock import check_free
from finetune.system.messages import WrongUsage

KEY = "identity"  # of run.json


@dataclass(frozen=True)
class Identity:
    """What a run is of; in a search None and "" stand for any.

    Attributes:
        place: Real path or address of the folder or table of images.
        data_class: Class path of the data module.
        network: The network as the user asked for it, such as `auto`.
        chosen: The network that was trained.
        folds: Number of folds of a cross-validation; None for a single fit.
    """

    place: str = ""
    data_class: str = ""
    network: str = ""
    chosen: str = ""
    folds: int | None = None

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, wanted: "Identity") -> str:
        """Return how a run of this identity differs from the data and the network that a command names; "" if not."""
        if wanted.network and wanted.network not in (self.network, self.chosen):
            return f"of another network ({self.chosen}, not {wanted.network})"
        if wanted.data_class and wanted.data_class != self.data_class:
            return f"of other data ({self.data_class}, not {wanted.data_class})"
        if wanted.place and wanted.place != self.place:
            return f"of other data ({self.place}, not {wanted.place})"
        return ""


def read_identity(run: Path) -> Identity | None:
    """Return the identity of a run; None if it has recorded none, or its run.json is damaged."""
    try:
        return msgspec.convert(RunDir(run).facts().get(KEY), Identity)
    except ValueError:  # of both
        return None


class Found(NamedTuple):
    """The run of the data and the network of a command that `--resume` continues.

    Attributes:
        run: Its folder; None if there is none.
        begun: A newer run of the same that ended before its first checkpoint; None for none.
        passed: Newer runs of other data or another network, and how they differ.
    """

    run: Path | None
    begun: Path | None
    passed: Mapping[Path, str]

    def passed_in_words(self) -> str:
        """Return the newest run that was passed over and how it differs, in words; "" for none."""
        if not self.passed:
            return ""
        run, difference = next(iter(self.passed.items()))
        more = f", and {len(self.passed) - 1} older of others, too" if len(self.passed) > 1 else ""
        return f"{run} is {difference}{more} (--resume RUN continues it)"


def find_run(root: Path, wanted: Identity) -> Found:
    """Return the run of `fit` in a folder of runs that goes on: the newest one that has the wanted identity.

    Runs that have ended come after all others. A cross-validation is found if it has the wanted number of folds, or has
    not ended if none is wanted.

    Args:
        root: The folder of runs.
        wanted: The data and the network.

    Raises:
        ValueError: Another process has begun a run of this identity.
        StorageError: The runs are in object storage, which cannot be reached.
    """
    # with numpy, which most commands do not need
    from finetune.runs.run_download import fetch_beginnings, has_remote_last

    fetch_beginnings(root)
    passed: dict[Path, str] = {}
    ended: Found | None = None
    begun: Path | None = None
    for run in reversed(runs_of(root)):
        identity = read_identity(run)
        has_last = (run / "checkpoints" / "last.ckpt").is_file() or (
            address_of(run) is not None and has_remote_last(run)
        )
        has_best = (run / "checkpoints" / "best.ckpt").is_file()  # alone, if last.ckpt was deleted
        if identity is None:
            if has_last:
                passed[run] = "without a readable run.json"
            continue
        if wanted.folds is not None and identity.folds != wanted.folds:
            continue
        if difference := identity.difference(wanted):
            passed[run] = difference
        elif RunDir(run).has_ended and (has_last or has_best or identity.folds is not None):
            if wanted.folds is not None or identity.folds is None:
                ended = ended or Found(run, begun, dict(passed))
        elif has_last or identity.folds is not None:
            return Found(run, None, passed)
        else:
            # This never finds a run of our own rank 0: that makes its folder after all ranks have passed this line.
            check_free(run)
            begun = begun or run
    return ended or Found(None, begun, passed)


def check_has_last(run: Path) -> None:
    """Check that the last.ckpt of a finished run was not deleted.

    A run that was killed may have only a best.ckpt, too: that of a validation in its first epoch.

    Raises:
        WrongUsage: It was.
    """
    folder = RunDir(run)
    is_kept = folder.has("best") and not folder.has("last")
    if is_kept and folder.has_ended and folder.num_folds is None:
        raise WrongUsage(
            f"{shown_place(run)} cannot be resumed: its last.ckpt was deleted (--keep_last false); "
            f"start a new run from its weights: finetune fit FOLDER --weights {run}"
        )
