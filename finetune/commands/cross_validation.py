"""`finetune fit --folds`: cross-validation. It runs a fit for each fold, one after another, and joins their results."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from finetune.commands.explicit_settings import read_explicit_settings
from finetune.commands.fold_data import check_folds
from finetune.commands.fold_results import (
    answers_of,
    merged_about,
    merged_result,
    write_predictions,
)
from finetune.commands.fold_search import folder_to_continue, root_of
from finetune.commands.parsed_line import ParsedLine, format_line, parse_line
from finetune.commands.report import page_of
from finetune.commands.resumption import data_module
from finetune.data.addresses import is_address, joined
from finetune.data.data_place import address_in
from finetune.data.data_settings import MAX_FOLDS
from finetune.distributed.child_command import start_command, wait_for
from finetune.distributed.launch import has_launcher
from finetune.inference.joined_checkpoint import join_checkpoints
from finetune.models.ensemble import MAX_MEMBERS
from finetune.runs.fold_record import (
    FoldRecord,
    fold_runs,
    has_ended,
    read_folds,
    write_folds,
)
from finetune.runs.folder import (
    Run,
    check_name,
    check_unused,
    has_result,
    last_checkpoint,
    missing_folders,
    remove_empty,
)
from finetune.runs.outcome import INTERVAL, outcome_line
from finetune.runs.record import RunRecord, read_run
from finetune.runs.result_file import write_result
from finetune.runs.run_lock import (
    descriptors_for_children,
    hold,
    release_run,
    wait_for_children,
)
from finetune.runs.run_search import now, read_about, runs_of, write_about
from finetune.runs.statistics import percent
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage, be_quiet, only_errors

log = logging.getLogger(__name__)

# The flags that this command takes itself; a fold gets its own.
_OWN = ("folds", "name", "resume", "trainer.default_root_dir")
_PLACES = ("data.table", "data.root")  # where the images are
# Minutes. If no time is left, the error of the first fold names the time that it needs.
_SHORTEST = 1e-3
# Flags that cannot go with folds, and why.
_REFUSED = MappingProxyType(
    {
        "data.fold": "--folds runs all folds",
        "data.num_folds": "--folds runs all folds",
        "data.test_fraction": "with --folds each image is tested once",
        "ckpt_path": "a checkpoint may have seen the images that a fold tests: pass --weights",
        "test_after_fit": "with --folds each image is tested once",
        "trainer.limit_test_batches": "with --folds each image is tested once",
        "trainer.num_nodes": "folds run on one machine",
        "allow_changes": "all folds must have the same settings",
    }
)


def fit_folds(arguments: Sequence[str], typed: Sequence[str], began: float) -> None:
    """Run or continue a cross-validation.

    Args:
        arguments: The expanded command line.
        typed: The command line as typed.
        began: `time.monotonic` when the command started.
    """
    be_quiet()
    line = parse_line(arguments[1:])
    _check_possible(line)
    missing = missing_folders(root_of(line) / "fit")
    folder, record, changes = _begin_or_continue(line)
    wait_for_children(folder)
    changes = _with_shared_minutes(folder, record, changes, began)
    _write_beginning(folder, shlex.join(["finetune", *typed]))
    for fold, run in enumerate(fold_runs(folder, record.num_folds), 1):
        command = _fold_command(folder, record, fold, changes)
        if command is None:
            log.info("fold %d of %d has ended: %s", fold, record.num_folds, run)
        else:
            log.info("fold %d of %d", fold, record.num_folds)
            _run_fold(folder, record, command, missing)
        if fold == 1:
            _write_config(folder, run)
    _conclude(folder, record)


def _run_fold(
    folder: Path, record: FoldRecord, command: list[str], missing: Sequence[Path]
) -> None:
    """Run a fold. If it fails, this process ends, and a folder without results is deleted, as that of any run.

    Args:
        folder: The folder of the cross-validation.
        record: Its record.
        command: The command line of the fold.
        missing: Folders around it that did not exist before this command, innermost first. They are deleted, too.
    """
    code = _run(folder, command, record)
    if not code:
        return
    if has_result(folder):
        log.warning("to continue: finetune fit --resume %s", shlex.quote(str(folder)))
    else:
        release_run(folder)
        shutil.rmtree(folder, ignore_errors=True)
        remove_empty(missing)
    sys.exit(code)


def _run(folder: Path, command: list[str], record: FoldRecord) -> int:
    """Run a command where the cross-validation began, to which its paths are relative, and return its exit code."""
    options: dict[str, Any] = {"pass_fds": descriptors_for_children(folder)}
    if Path(record.working_dir).resolve() != Path.cwd():
        options["cwd"] = record.working_dir
    return wait_for(start_command(command, **options))


def _check_possible(line: ParsedLine) -> None:
    """Refuse what folds cannot have.

    Raises:
        WrongUsage: A flag does not go with folds or has a wrong value, or a launcher has started this process.
    """
    names = {name.replace("data.init_args.", "data."): value for name, value in line.flags}
    for name, why in _REFUSED.items():
        if names.get(name) not in (None, "null"):
            raise WrongUsage(f"--{name} does not go with --folds: {why}")
    if is_address(names.get("trainer.default_root_dir")):
        raise WrongUsage(
            "--folds writes to a local folder: pass one as --out, and copy it to object storage afterwards"
        )
    _check_minutes(names.get("minutes"))
    configs = read_explicit_settings(format_line("fit", line)).configs
    has_minutes = any(config.settings.get("minutes") is not None for config in configs)
    if has_minutes and "minutes" not in names:
        raise WrongUsage(
            "a config gives minutes, which --folds does not divide: pass --minutes on the command line"
        )
    if has_launcher():
        raise WrongUsage(
            "--folds starts a process for each fold: with torchrun or srun, run each fold by --data.num_folds and "
            "--data.fold"
        )


def _with_shared_minutes(
    folder: Path, record: FoldRecord, changes: Sequence[tuple[str, str | None]], began: float
) -> list[tuple[str, str | None]]:
    """Return the changed flags, with the share of the first fold of the time that `--minutes` allows.

    The first fold measures how long it can be, and the others have its length. So the folds have equal settings, and
    the ones that continue later need no time to measure. A fold that continues has its length already.

    Args:
        folder: The folder of the cross-validation.
        record: Its record.
        changes: The flags that change a continued one.
        began: `time.monotonic` when the command started.
    """
    flags = {**dict(record.flags), **dict(changes)}
    text = flags.get("minutes")
    others = [(name, value) for name, value in changes if name != "minutes"]
    if text is None or text == "null":
        return others
    first = fold_runs(folder, record.num_folds)[0]
    if has_ended(first) or last_checkpoint(first).is_file():
        if "minutes" in dict(changes):
            log.info(
                "--minutes is for new runs: the folds keep the length that the first one chose"
            )
        return others
    left = float(text) - (time.monotonic() - began) / 60
    share = max(left, _SHORTEST) / record.num_folds
    log.info(
        "--minutes %s: %.3g minutes for each of %d folds; the first one chooses the length, and the others have the "
        "same",
        text,
        share,
        record.num_folds,
    )
    return [*others, ("minutes", f"{share:.6g}")]


def _check_minutes(text: str | None) -> None:
    """Make sure that the value of `--minutes` can be divided.

    Raises:
        WrongUsage: It is not a number above 0.
    """
    if text is None or text == "null":
        return
    if not 0 < float(text) < math.inf:
        raise WrongUsage(f"--minutes must be a number and more than 0, got {text}")


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
    root = root_of(line)
    if line.has("resume"):
        folder = folder_to_continue(line, num_folds)
        if folder is not None:
            return _continue(folder, num_folds, flags)
        log.info(
            "--resume found no run with folds of these data in %s: a new one begins", root / "fit"
        )
    if num_folds is None:
        raise WrongUsage("--folds needs a number: finetune fit FOLDER --folds 5")
    _check_members(line, num_folds)
    name = line.last("name")
    if name is not None:
        check_name(name)
        check_unused(root / "fit" / name)
    record = FoldRecord(num_folds, flags, os.getcwd())
    check_folds(record, [])
    folder = Run(root, "fit", name=name).choose()
    write_about(folder, {})  # first, since a folder without it is not taken for a run
    write_folds(folder, record)
    return folder, record, []


def _continue(
    folder: Path, num_folds: int | None, flags: list[tuple[str, str | None]]
) -> tuple[Path, FoldRecord, list[tuple[str, str | None]]]:
    """Return the same as `_begin_or_continue` for a cross-validation that continues.

    Args:
        folder: Its folder.
        num_folds: The number of folds that the command names; None for none.
        flags: The flags of the command.

    Raises:
        WrongUsage: It has another number of folds.
        ValueError: Another process is writing it, or its images cannot be split as before.
    """
    hold(folder)
    log.info("continuing the cross-validation in %s", folder)
    record = read_folds(folder)
    if Path(record.working_dir).resolve() != Path.cwd():
        folder = folder.resolve()
        flags = [flag for flag in flags if flag[0] not in _PLACES]
    if num_folds not in (None, record.num_folds):
        raise WrongUsage(f"{folder} has {record.num_folds} folds, not {num_folds}: omit --folds")
    if not all(map(has_ended, fold_runs(folder, record.num_folds))):
        config = folder / "config.yaml"
        check_folds(record, flags, config if config.is_file() else None)
    return folder, record, flags


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


def _write_beginning(folder: Path, command: str) -> None:
    """Write how the cross-validation began, or went on, into about.json."""
    about = read_about(folder)
    if "command" in about:
        went_on_by = [*about.get("went_on_by", []), command]
        about = {name: about[name] for name in ("command", "began", "folder") if name in about}
        about["went_on_by"] = went_on_by
    else:
        about = {"command": command, "began": now(), "folder": os.getcwd()}
    write_about(folder, about)


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
    answers = [answers_of(run) for run in runs]
    settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))["data"]
    arguments = dict(settings["init_args"])
    for name in ("root", "table", "corrections"):
        if arguments.get(name):
            arguments[name] = joined(record.working_dir, arguments[name])
    with only_errors("finetune.data"):  # the folds have logged the same
        data = data_module(settings["class_path"], arguments)
    checkpoint = folder / "checkpoints" / "best.ckpt"
    calibration = join_checkpoints(
        [run.path / "checkpoints" / "best.ckpt" for run in runs],
        answers,
        checkpoint,
        data.fingerprint,
    )
    write_predictions([run.path for run in runs], folder / "predictions.csv")
    result = merged_result(runs, calibration)
    if "test" in data.splits and not data.splits["test"].is_drawn:
        result["test_folder"] = _test_together(folder, record, arguments)
    write_result(folder / "test.json", result)
    _write_seconds(folder, runs)
    write_about(folder, {**merged_about(runs, read_about(folder)), "ended": now()})
    _print_result(result, calibration.describe(result["class_names"])[1:])
    _report(folder, read_run(folder))
    if missed := calibration.describe_unreached_aim(result["class_names"]):
        raise ValueError(f"{missed}; {checkpoint} has no threshold for it")


def _test_together(
    folder: Path, record: FoldRecord, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result on the test folder of the networks of all folds together.

    Args:
        folder: The folder of the cross-validation.
        record: Its record.
        arguments: Those of its data module.
    """
    flags: list[tuple[str, str | None]] = [
        ("ckpt_path", str(folder / "checkpoints" / "best.ckpt")),
        ("trainer.default_root_dir", str(folder)),
    ]
    if address_in(arguments) is not None:  # which the checkpoint may not choose
        places = (name for name in ("root", "table") if arguments.get(name))
        flags += [(f"data.{name}", arguments[name]) for name in places]
    log.info("testing the networks of all folds together on the test folder")
    if code := _run(folder, format_line("test", ParsedLine(flags)), record):
        sys.exit(code)
    newest = runs_of(folder, "test")[-1]
    result = read_run(newest).result
    names = ("confusion_matrix", "label_counts", "test/mAP", INTERVAL, "test/exact_match")
    return {
        "run": f"test/{newest.name}",
        **{name: result[name] for name in names if name in result},
    }


def _write_seconds(folder: Path, runs: Sequence[RunRecord]) -> None:
    phases = dict.fromkeys(phase for run in runs for phase in run.seconds)
    seconds = {phase: sum(run.seconds.get(phase, 0.0) for run in runs) for phase in phases}
    replace_text(folder / "seconds.json", json.dumps(seconds, indent=2) + "\n")


def _print_result(result: dict[str, Any], thresholds: Sequence[str]) -> None:
    """Print the result over all images, and of each fold.

    Args:
        result: The content of test.json.
        thresholds: The thresholds of the networks of all folds together in words; empty if there are none.
    """
    rows = result["folds"]
    print(f"{outcome_line(result)}, each image in one of {len(rows)} folds")
    if "mAP" in rows[0]:
        values = ["none" if row["mAP"] is None else f"{row['mAP']:.3f}" for row in rows]
        print(f"test mAP of the folds: {', '.join(values)}")
    else:
        shares = [percent(row["num_right"] / max(1, row["num_images"])) for row in rows]
        print(f"test accuracy of the folds: {', '.join(shares)}")
    if thresholds:
        print("each fold decided by thresholds that it chose on its own validation images")
        print("thresholds of all folds together, chosen on these predictions for new images:")
    for line in thresholds:
        print(f"  {line}")
    if together := outcome_line(result.get("test_folder", {})):
        print(f"all folds together on the test folder: {together}")


def _report(folder: Path, record: RunRecord) -> None:
    """Print the folder and what to do next, and write the report."""
    print(f"run in {folder}", flush=True)
    if record.setting("report") is not False:
        try:
            print(f"report in {page_of(record)}")
        except Exception as error:  # of whatever draws or reads: the results are complete
            log.warning(
                "cannot write the report: %s. Try again with finetune report %s", error, folder
            )
    print(f"next: finetune predict {shlex.quote(str(folder))} IMAGES", flush=True)
