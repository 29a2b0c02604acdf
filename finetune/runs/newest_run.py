"""Find the run that `--resume` continues: the newest one of the same data and network."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.data.addresses import joined, real_place
from finetune.data.data_place import place_of
from finetune.data.groups import is_pattern
from finetune.models.checkpoint_values import class_paths
from finetune.runs.fold_record import has_folds
from finetune.runs.folder import last_checkpoint, runs_elsewhere
from finetune.runs.local_copies import address_of, shown_place
from finetune.runs.resume import Start, read_start
from finetune.runs.run_download import fetch_beginnings, fetch_run, has_remote_last
from finetune.runs.run_lock import check_free
from finetune.runs.run_search import has_ended, read_about, runs_of
from finetune.system.messages import WrongUsage, reason

# Arguments of the model in a checkpoint that `--resume` does not take from there: the data give the first two, the
# others decided only how the run began.
_NOT_RESUMED = frozenset(
    {"class_names", "network_size", "head_init", "source_classes", "class_mapping"}
)
_TRANSFORMS = "albumentations"


@dataclass(frozen=True)
class RunFilter:
    """The data and the network that a command names; None where any will do.

    Attributes:
        root: Folder or table of the data.
        data_class: Class path of the data module.
        backbone: Name of the network.
        is_ranked: Whether the network must have been chosen by `--backbone auto`.
    """

    root: str | None
    data_class: str | None
    backbone: str | None
    is_ranked: bool = False

    def difference(self, run: Path, settings: Mapping[str, Any]) -> str:
        """Return how a run differs in data or network; "" if it does not, or if its settings are missing."""
        data = settings.get("data") or {}
        model = settings.get("model") or {}
        if self.backbone not in (None, model.get("backbone", self.backbone)):
            return f"of another network ({model['backbone']}, not {self.backbone})"
        if self.is_ranked and read_about(run).get("backbone_ranking") is None:
            return f"of a chosen network, {model.get('backbone')}, not of --backbone auto"
        if self.data_class not in (None, data.get("class_path", self.data_class)):
            return f"of other data ({data['class_path']}, not {self.data_class})"
        if self.root is None or not data:
            return ""
        root = place_of(data.get("init_args") or {})
        if root is not None and _is_same_data(run, root, self.root):
            return ""
        of_run = None if root is None else joined(working_dir_of(run), root)
        return f"of other data ({of_run}, not {self.root})"


class NewestRun(NamedTuple):
    """The newest run of a data set and network.

    Attributes:
        run: Its folder; None if no such run has a `last.ckpt`.
        settings: The content of its config.yaml; if that is missing, the settings in its checkpoint.
        begun: A newer run of the same that ended before its first checkpoint.
        skipped: Newer runs of other data or another network, and how they differ.
        elsewhere: Runs in other folders, where `--resume` does not look.
    """

    run: Path | None
    settings: dict[str, Any]
    begun: Path | None
    skipped: list[tuple[Path, str]]
    elsewhere: list[Path]

    def newer(self) -> tuple[Path, ...]:
        """Return the runs of `elsewhere` that are newer than the run."""
        if self.run is None:
            return ()
        written = last_checkpoint(self.run).stat().st_mtime
        times = {other: last_checkpoint(other).stat().st_mtime for other in self.elsewhere}
        return tuple(other for other, time in times.items() if time > written)


def find_run(
    root: Path, wanted: RunFilter, read: Callable[[Path], Start] = read_start
) -> NewestRun:
    """Return the newest run in `root` that is of the wanted data and network.

    Args:
        root: The folder of all runs.
        wanted: The data and the network.
        read: Reads a checkpoint.

    Raises:
        ValueError: Another process has begun a newer one, or a config.yaml is damaged; or the newest run keeps only its
            best checkpoint.
        StorageError: The runs are in object storage, which cannot be reached.
    """
    begun: Path | None = None
    skipped: list[tuple[Path, str]] = []
    fetch_beginnings(root)
    runs = runs_of(root)
    elsewhere = runs_elsewhere(root, runs)
    for run in reversed(runs):
        if has_folds(run):
            continue
        if difference := _remote_difference(run, wanted):
            if has_remote_last(run):
                skipped.append((run, difference))
            continue
        fetch_run(run)
        has_checkpoint = last_checkpoint(run).is_file()
        if begun is None and not has_checkpoint:
            settings = settings_of(run, read)
            if wanted.difference(run, settings):
                continue
            check_has_last(run)
            # This never finds a run of our own rank 0: that makes its folder after all ranks have passed this line.
            check_free(run)
            begun = run
        elif has_checkpoint:
            settings = settings_of(run, read)
            if difference := wanted.difference(run, settings):
                skipped.append((run, difference))
                continue
            return NewestRun(run, settings, begun, skipped, elsewhere)
    return NewestRun(None, {}, begun, skipped, elsewhere)


def _remote_difference(run: Path, wanted: RunFilter) -> str:
    """Return how a run in object storage differs, by its config.yaml and about.json, before it is downloaded.

    "" if it does not, if its settings are not readable, or if the run is a local one.
    """
    if address_of(run) is None or not (run / "config.yaml").is_file():
        return ""
    try:
        settings = settings_of(run)
    except ValueError:
        return ""
    return wanted.difference(run, settings)


def check_has_last(run: Path) -> None:
    """Check that the last.ckpt of a finished run was not deleted.

    A run that was killed may have only a best.ckpt, too: that of a validation in its first epoch.

    Raises:
        WrongUsage: It was.
    """
    has_best = (run / "checkpoints" / "best.ckpt").is_file()
    if has_best and not last_checkpoint(run).is_file() and has_ended(run):
        raise WrongUsage(
            f"{shown_place(run)} cannot be resumed: its last.ckpt was deleted (--keep_last false); "
            f"start a new run from its weights: finetune fit FOLDER --weights {run}"
        )


def settings_of(run: Path, read: Callable[[Path], Start] = read_start) -> dict[str, Any]:
    """Return the content of a run's config.yaml; if that is missing, the settings in its checkpoint.

    Raises:
        ValueError: config.yaml is damaged.
    """
    path = run / "config.yaml"
    if not path.exists():
        if not last_checkpoint(run).is_file():
            return {}
        return _settings_in(read(last_checkpoint(run)).content)
    try:
        settings = yaml.safe_load(path.read_text("utf-8"))
        if not isinstance(settings, dict) or not _has_sections(settings):
            raise ValueError("it has no settings")
    except (ValueError, yaml.YAMLError) as error:
        message = f"{path} is damaged: {reason(error)}; move it away, and --resume ignores it"
        raise ValueError(message) from error
    return settings


def _has_sections(settings: dict[str, Any]) -> bool:
    return all(isinstance(settings.get(name) or {}, dict) for name in ("data", "model", "trainer"))


def _settings_in(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the network in a checkpoint, and those of the data if they name only our own classes."""
    arguments = {
        name: value
        for name, value in checkpoint["hyper_parameters"].items()
        if name not in _NOT_RESUMED
    }
    settings: dict[str, Any] = {"model": {**arguments, "weights": arguments.get("weights")}}
    class_path = checkpoint["finetune"].get("data_class")
    data_arguments = dict(checkpoint["datamodule_hyper_parameters"])
    if is_pattern(data_arguments.get("group_by")):  # the command line may name it
        del data_arguments["group_by"]
    modules = {
        path.rpartition(".")[0] or _TRANSFORMS
        for path in class_paths(data_arguments)
        if isinstance(path, str)
    }
    if str(class_path).startswith("finetune.") and modules <= {_TRANSFORMS}:
        settings["data"] = {"class_path": class_path, "init_args": data_arguments}
    return settings


def _is_same_data(run: Path, own: str, place: str) -> bool:
    """Return whether the folder or table of a run is that of a command."""
    before = joined(working_dir_of(run), own)
    has_moved = own == place and not os.path.exists(before)  # with the runs next to it
    return has_moved or real_place(before) == real_place(place)


def new_run_message(root: Path, skipped: list[tuple[Path, str]], elsewhere: Sequence[Path]) -> str:
    """Return the message for a `--resume` that begins a new run."""
    where = shown_place((root / "fit").resolve())
    others = "".join(f"; {run} is not in {where}" for run in elsewhere)
    message = f"--resume found no run with a last.ckpt in {where}"
    if skipped:
        message += f", since {describe_skipped(skipped)}"
    return f"{message}: a new run begins{others}"


def describe_skipped(skipped: list[tuple[Path, str]]) -> str:
    """Return in words which newer runs, at least one, are of other data or another network."""
    run, difference = skipped[0]
    more = f", and {len(skipped) - 1} older of others, too" if len(skipped) > 1 else ""
    return f"{run} is {difference}{more}"


def working_dir_of(run: Path) -> str:
    """Return the working directory in which a run was started, to which its paths are relative; "" if unknown."""
    folder = read_about(run).get("folder")
    return folder if isinstance(folder, str) else ""
