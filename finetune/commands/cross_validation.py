"""`finetune fit --folds`: cross-validation. It runs a fit for each fold, one after another, and joins their results."""

import json
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from finetune.commands.fold_results import merged_about, merged_result, write_predictions
from finetune.commands.parsed_line import ParsedLine, format_line, parse_line
from finetune.commands.report import page_of
from finetune.commands.resumption import data_module
from finetune.commands.trainer import DEFAULTS
from finetune.data.data_settings import MAX_FOLDS
from finetune.data.splits import SET_APART
from finetune.distributed.child_command import start_command, wait_for
from finetune.distributed.launch import has_launcher
from finetune.inference.joined_checkpoint import join_checkpoints
from finetune.models.ensemble import MAX_MEMBERS
from finetune.runs.data_check import data_check
from finetune.runs.fold_record import (
    FoldRecord,
    fold_runs,
    has_ended,
    has_folds,
    read_folds,
    write_folds,
)
from finetune.runs.folder import Run, check_name, check_unused, has_result, last_checkpoint
from finetune.runs.record import RunRecord, read_run
from finetune.runs.results import write_results
from finetune.runs.run_lock import hold, release_run
from finetune.runs.run_search import now, read_about, runs_of
from finetune.runs.statistics import outcome, percent
from finetune.system.files import replace_text
from finetune.system.messages import NotFound, WrongUsage, be_quiet

log = logging.getLogger(__name__)

# The flags that this command takes itself; a fold gets its own.
_OWN = ("folds", "name", "resume", "trainer.default_root_dir")
_PLACES = ("data.table", "data.root")  # where the images are
# Flags that cannot go with folds, and why.
_REFUSED = MappingProxyType(
    {
        "data.fold": "--folds runs all folds",
        "data.num_folds": "--folds runs all folds",
        "data.test_fraction": "with --folds each image is tested once",
        "ckpt_path": "a checkpoint may have seen the images that a fold tests: give --weights",
        "threshold": "each fold would choose another one: choose it in predictions.csv",
        "minutes": "it chooses the length for one fit: give --epochs",
        "test_after_fit": "with --folds each image is tested once",
        "trainer.fast_dev_run": "it tests nothing",
        "trainer.limit_test_batches": "with --folds each image is tested once",
        "trainer.num_nodes": "folds run on one machine",
        "allow_changes": "all folds must have the same settings",
    }
)


def fit_folds(arguments: Sequence[str], typed: Sequence[str]) -> None:
    """Run or continue a cross-validation.

    Args:
        arguments: The expanded command line.
        typed: The command line as typed.
    """
    be_quiet()
    line = parse_line(arguments[1:])
    _check_possible(line)
    folder, record, changes = _begin_or_continue(line)
    _write_beginning(folder, shlex.join(["finetune", *typed]))
    for fold, run in enumerate(fold_runs(folder, record.num_folds), 1):
        command = _fold_command(folder, record, fold, changes)
        if command is None:
            log.info("fold %d of %d has ended: %s", fold, record.num_folds, run)
        else:
            log.info("fold %d of %d", fold, record.num_folds)
            _run_fold(folder, record, command)
        if fold == 1:
            _write_config(folder, run)
    _conclude(folder, record)


def _run_fold(folder: Path, record: FoldRecord, command: list[str]) -> None:
    """Run a fold. If it fails, this process ends, and a folder without results is deleted, as that of any run."""
    code = _run(command, record)
    if not code:
        return
    if has_result(folder):
        log.warning("to continue: finetune fit --resume %s", shlex.quote(str(folder)))
    else:
        release_run(folder)
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


def _run(command: list[str], record: FoldRecord) -> int:
    """Run a command where the cross-validation began, to which its paths are relative, and return its exit code."""
    if Path(record.working_dir).resolve() == Path.cwd():
        return wait_for(start_command(command))
    return wait_for(start_command(command, cwd=record.working_dir))


def _check_possible(line: ParsedLine) -> None:
    """Refuse what folds cannot have.

    Raises:
        WrongUsage: A flag does not go with folds, or a launcher has started this process.
    """
    names = {name.replace("data.init_args.", "data."): value for name, value in line.flags}
    for name, why in _REFUSED.items():
        if names.get(name) not in (None, "null"):
            raise WrongUsage(f"--{name} does not go with --folds: {why}")
    if has_launcher():
        raise WrongUsage(
            "--folds starts a process for each fold: with torchrun or srun, run each fold by --data.num_folds and "
            "--data.fold"
        )


def _check_members(line: ParsedLine, num_folds: int) -> None:
    """Make sure that the networks of all folds fit into one ensemble.

    Raises:
        WrongUsage: They are too many.
    """
    members = line.last("model.members") or "1"
    if members.isdecimal() and int(members) * num_folds > MAX_MEMBERS:
        raise WrongUsage(
            f"{num_folds} folds of {members} members are more than {MAX_MEMBERS} networks: take fewer of them"
        )


def _begin_or_continue(line: ParsedLine) -> tuple[Path, FoldRecord, list[tuple[str, str | None]]]:
    """Return the folder of the cross-validation, its record, and the flags that change a continued one."""
    flags = [(name, value) for name, value in line.flags if name not in _OWN]
    wanted = line.last("folds")
    num_folds = None if wanted is None else _number(wanted)
    root = Path(line.last("trainer.default_root_dir") or str(DEFAULTS["default_root_dir"]))
    name = line.last("name")
    if line.has("resume"):
        data = line.last("data.table") or line.last("data.root")
        folder = _folder_to_continue(line.last("resume"), root, name, num_folds, data)
        if folder is not None:
            hold(folder)
            record = read_folds(folder)
            if Path(record.working_dir).resolve() != Path.cwd():
                folder = folder.resolve()
                flags = [flag for flag in flags if flag[0] not in _PLACES]
            if num_folds not in (None, record.num_folds):
                raise WrongUsage(
                    f"{folder} has {record.num_folds} folds, not {num_folds}: leave --folds out"
                )
            return folder, record, flags
        log.info(
            "--resume found no run with folds of these data in %s: a new one begins", root / "fit"
        )
    if num_folds is None:
        raise WrongUsage("--folds needs a number: finetune fit FOLDER --folds 5")
    _check_members(line, num_folds)
    if name is not None:
        check_name(name)
        check_unused(root / "fit" / name)
    folder = Run(root, "fit", name=name).choose()
    record = FoldRecord(num_folds, flags, os.getcwd())
    write_folds(folder, record)
    return folder, record, []


def _number(text: str) -> int:
    """Return the number of folds.

    Raises:
        WrongUsage: It is not a whole number, or out of range.
    """
    try:
        num = int(text)
    except ValueError:
        raise WrongUsage(f"--folds must be a whole number, got {text!r}") from None
    if not 2 <= num <= MAX_FOLDS:
        raise WrongUsage(f"--folds must be from 2 to {MAX_FOLDS}, got {num}")
    return num


def _folder_to_continue(
    resume: str | None, root: Path, name: str | None, num_folds: int | None, data: str | None
) -> Path | None:
    """Return the folder of the cross-validation to continue; None if there is none.

    Args:
        resume: The value of `--resume`: a folder, or None or `true` for the newest one.
        root: The folder of all runs.
        name: The name of the run, if there is one.
        num_folds: The number of folds that it must have; None for any.
        data: The data folder or table that it must have; None for any.

    Raises:
        NotFound: The named folder is not that of a cross-validation.
    """
    if resume not in (None, "true", "True"):
        folder = Path(resume)
        if not has_folds(folder):
            raise NotFound(
                f"--resume {folder}: it has no folds.json, so it is not a run with --folds"
            )
        return folder
    if name is not None:
        return root / "fit" / name if has_folds(root / "fit" / name) else None
    for folder in reversed(runs_of(root)):
        if not has_folds(folder):
            continue
        record = read_folds(folder)
        own = record.flag("data.table") or record.flag("data.root")
        is_same = data is None or (
            own is not None and Path(record.working_dir, own).resolve() == Path(data).resolve()
        )
        if is_same and num_folds in (None, record.num_folds):
            return folder
    return None


def _write_beginning(folder: Path, command: str) -> None:
    """Write how the cross-validation began, or went on, into about.json."""
    about = read_about(folder)
    if about:
        went_on_by = [*about.get("went_on_by", []), command]
        about = {name: about[name] for name in ("command", "began", "folder") if name in about}
        about["went_on_by"] = went_on_by
    else:
        about = {"command": command, "began": now(), "folder": os.getcwd()}
    _write_about(folder, about)


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    replace_text(folder / "about.json", json.dumps(about, indent=2) + "\n")


def _fold_command(
    folder: Path, record: FoldRecord, fold: int, changes: list[tuple[str, str | None]]
) -> list[str] | None:
    """Return the command line of a fold; None if it has nothing left to do.

    The first fold may choose settings, such as the network or the epochs. The other folds have the same ones.
    """
    run = fold_runs(folder, record.num_folds)[fold - 1]
    can_go_on = last_checkpoint(run).is_file()
    if has_ended(run) and (not can_go_on or all(name in _PLACES for name, _ in changes)):
        return None
    if can_go_on:
        return format_line("fit", ParsedLine([*changes, ("resume", str(run))]))
    flags: list[tuple[str, str | None]]
    if fold == 1:
        changed = {name for name, _ in changes}
        flags = [flag for flag in record.flags if flag[0] not in changed] + changes
    else:
        flags = [("config", str(folder / "config.yaml"))]
    flags += [
        ("trainer.default_root_dir", str(folder)),
        ("name", run.name),
        ("data.num_folds", str(record.num_folds)),
        ("data.fold", str(fold)),
    ]
    return format_line("fit", ParsedLine(flags))


def _write_config(folder: Path, first: Path) -> None:
    """Write config.yaml with the settings of all folds: those of the first one, without its number and place."""
    text = (first / "config.yaml").read_text("utf-8")
    text = re.sub(r"^( +)(fold|num_folds): \d+$", r"\1\2: null", text, flags=re.MULTILINE)
    root = json.dumps(str(folder.parent.parent), ensure_ascii=False)
    text = re.sub(
        r"^( +default_root_dir): .*$", lambda match: f"{match[1]}: {root}", text, flags=re.MULTILINE
    )
    replace_text(folder / "config.yaml", text)


def _conclude(folder: Path, record: FoldRecord) -> None:
    """Join the results of the folds, and print them."""
    runs = [read_run(run) for run in fold_runs(folder, record.num_folds)]
    for run in runs:
        if not run.result or run.answers is None:
            raise ValueError(f"{run.path} has no result of its test, so the folds cannot be joined")
    settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))["data"]
    arguments = dict(settings["init_args"])
    for name in ("root", "table"):
        if arguments.get(name):
            arguments[name] = os.path.join(record.working_dir, arguments[name])
    with _silent(logging.getLogger("finetune.data")):  # the folds have logged the same
        data = data_module(settings["class_path"], arguments)
    checkpoint = folder / "checkpoints" / "best.ckpt"
    join_checkpoints(
        [run.path / "checkpoints" / "best.ckpt" for run in runs], checkpoint, data.fingerprint
    )
    write_predictions([run.path for run in runs], folder / "predictions.csv")
    result = merged_result(runs)
    if "test" in data.splits and data.splits["test"].origin != SET_APART:
        result["test_folder"] = _test_together(folder, record)
    write_results(folder / "test.json", result)
    _write_seconds(folder, runs)
    _write_about(folder, {**merged_about(runs, read_about(folder)), "ended": now()})
    _print_result(folder, result, read_run(folder).setting("report") is not False)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    """Log only errors within the context."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _test_together(folder: Path, record: FoldRecord) -> dict[str, Any]:
    """Return the result on the test folder of the networks of all folds together."""
    flags: list[tuple[str, str | None]] = [
        ("ckpt_path", str(folder / "checkpoints" / "best.ckpt")),
        ("trainer.default_root_dir", str(folder)),
    ]
    log.info("testing the networks of all folds together on the test folder")
    if code := _run(format_line("test", ParsedLine(flags)), record):
        sys.exit(code)
    newest = runs_of(folder, "test")[-1]
    confusion = read_run(newest).result["confusion_matrix"]
    return {"run": f"test/{newest.name}", "confusion_matrix": confusion}


def _write_seconds(folder: Path, runs: Sequence[RunRecord]) -> None:
    phases = dict.fromkeys(phase for run in runs for phase in run.seconds)
    seconds = {phase: sum(run.seconds.get(phase, 0.0) for run in runs) for phase in phases}
    replace_text(folder / "seconds.json", json.dumps(seconds, indent=2) + "\n")


def _print_result(folder: Path, result: dict[str, Any], has_report: bool) -> None:
    rows = result["folds"]
    shares = ", ".join(percent(row["num_right"] / max(1, row["num_images"])) for row in rows)
    print(f"{outcome(result['confusion_matrix'], 'test')}, each image in one of {len(rows)} folds")
    print(f"test accuracy of the folds: {shares}")
    if "test_folder" in result:
        print(
            f"all folds together on the test folder: {outcome(result['test_folder']['confusion_matrix'], 'test')}"
        )
    print(f"run in {folder}", flush=True)
    if has_report:
        record = read_run(folder)
        try:
            print(f"report in {page_of(record, check=data_check(record))}")
        except Exception as error:  # of whatever draws or reads: the results are complete
            log.warning(
                "cannot write the report: %s. Try again with finetune report %s", error, folder
            )
    print(f"next: finetune predict {shlex.quote(str(folder))} IMAGES", flush=True)
