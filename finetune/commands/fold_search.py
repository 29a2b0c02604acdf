"""Decide whether a fit is a cross-validation, and find the one that it continues. Nothing here imports torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune.commands.parsed_line import ParsedLine, parse_line
from finetune.data.addresses import joined, real_place
from finetune.data.data_place import place_of
from finetune.runs.fold_record import FoldRecord, fold_runs, has_folds, read_folds
from finetune.runs.run_search import check_is_in, read_about, runs_of
from finetune.system.messages import NotFound

_NEWEST = (None, "true", "True")  # values of `--resume` that do not name a run


def is_cross_validation(in_full: Sequence[str]) -> bool:
    """Return whether a `fit` is a cross-validation, or continues one.

    Args:
        in_full: The expanded command line.
    """
    line = parse_line(in_full[1:])
    if line.asks_for_help() or line.has("print_config"):
        return False
    if line.last("folds") not in (None, "null"):
        return True
    if not line.has("resume") or line.last("resume") in ("false", "False"):
        return False
    return folder_to_continue(line, None) is not None


def folder_to_continue(line: ParsedLine, num_folds: int | None) -> Path | None:
    """Return the folder of the cross-validation that `--resume` continues; None if there is none.

    Without `--folds` and the name of a run, that is the newest run of the same data and network, if it is a
    cross-validation that has not ended.

    Args:
        line: The expanded command line.
        num_folds: The number of folds that it must have; None for any.

    Raises:
        NotFound: `--folds` is given, and the run that `--resume` names is not a cross-validation.
        WrongUsage: This run is not in the folder of runs that the command names.
    """
    resume = line.last("resume")
    root = root_of(line)
    if resume not in _NEWEST:
        folder = Path(str(resume))
        if not has_folds(folder) and num_folds is not None:
            raise NotFound(
                f"--resume {folder}: it has no folds.json, so it is not a run with --folds"
            )
        if not has_folds(folder):
            return None
        check_is_in(line.last("trainer.default_root_dir"), folder)
        return folder
    if (name := line.last("name")) is not None:
        return root / "fit" / name if has_folds(root / "fit" / name) else None
    if num_folds is None:
        return _newest_unfinished(line, root)
    matching = (
        run for run in _cross_validations(line, root) if read_folds(run).num_folds == num_folds
    )
    return next(matching, None)


def root_of(line: ParsedLine) -> Path:
    """Return the folder of all runs."""
    return Path(line.last("trainer.default_root_dir") or "runs")


def _cross_validations(line: ParsedLine, root: Path) -> Iterator[Path]:
    """Yield the cross-validations of the data and the network of a command, the newest first."""
    return (run for run in reversed(runs_of(root)) if has_folds(run) and _is_same(run, line))


def _newest_unfinished(line: ParsedLine, root: Path) -> Path | None:
    """Return the newest run of the data and network of a command if it is a cross-validation that has not ended."""
    runs = [run for run in runs_of(root) if not _has_ended_folds(run)]
    if not any(map(has_folds, runs)):
        return None
    newest = next((run for run in reversed(runs) if _is_same(run, line)), None)
    return newest if newest is not None and has_folds(newest) else None


def _has_ended_folds(run: Path) -> bool:
    return has_folds(run) and "ended" in read_about(run)


def _is_same(run: Path, line: ParsedLine) -> bool:
    """Return whether a run has the data, the network and the config that a command names."""
    record = read_folds(run) if has_folds(run) else None
    settings = _settings(run, record)
    config = line.last("config")
    if record is not None and config not in (None, record.flag("config")):
        return False
    if not _has_network(line.last("model.backbone"), settings, record):
        return False
    place = line.last("data.table") or line.last("data.root")
    own = _place(settings, record)
    if place is None:
        return True
    working_dir = record.working_dir if record else str(read_about(run).get("folder", ""))
    return own is not None and real_place(joined(working_dir, own)) == real_place(place)


def _has_network(backbone: str | None, settings: dict[str, Any], record: FoldRecord | None) -> bool:
    """Return whether a run has the network that a command names, or may have chosen it."""
    if backbone is None:
        return True
    if record is None and (backbone == "auto" or "," in backbone):
        return True
    if record is not None and backbone == record.flag("model.backbone"):
        return True
    return backbone == (settings.get("model") or {}).get("backbone")


def _place(settings: dict[str, Any], record: FoldRecord | None) -> str | None:
    """Return the folder or table of the data of a run."""
    flags = {} if record is None else dict(record.flags)
    own = flags.get("data.table") or flags.get("data.root")
    return own or place_of((settings.get("data") or {}).get("init_args") or {})


def _settings(run: Path, record: FoldRecord | None) -> dict[str, Any]:
    """Return the content of a run's config.yaml, or of its first fold; {} if it cannot be read."""
    folder = run if record is None else fold_runs(run, record.num_folds)[0]
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}
