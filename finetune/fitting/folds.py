"""Cross-validation: the fit of a plan with each part of the images as test images, one after another, then a join."""

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.data.data_place import place_of
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.distributed.child_command import start_command, wait_for
from finetune.fitting.build import arguments_in_effect, data_arguments, open_data
from finetune.fitting.evaluate import evaluate
from finetune.fitting.fold_results import (
    merged_about,
    merged_result,
    predictions_of,
    write_predictions,
)
from finetune.fitting.plan import Plan, plan_file
from finetune.fitting.resume import (
    Changes,
    changes_between,
    check_changes,
    check_not_prolonged,
    describe_held,
    read_start,
)
from finetune.inference.joined_checkpoint import join_checkpoints
from finetune.reports.report_page import page_of
from finetune.runs.folder import Run, has_result, missing_folders, remove_empty
from finetune.runs.headline import INTERVAL, headline_of
from finetune.runs.limits import Limits
from finetune.runs.record import RunRecord, read_run
from finetune.runs.result_file import write_result
from finetune.runs.run_dir import RunDir, now
from finetune.runs.run_lock import (
    descriptors_for_children,
    hold,
    release_run,
    wait_for_children,
)
from finetune.runs.statistics import percent
from finetune.settings.fields import ClassSettings
from finetune.settings.layers import Layer, Layers
from finetune.settings.reader import read_config
from finetune.system.files import replace_text
from finetune.system.messages import only_errors

log = logging.getLogger(__name__)

_PLACES = {"data.root", "data.table", "data.corrections"}  # where the images are


def fit_folds(plan: Plan) -> Path:
    """Run or continue the cross-validation of a plan, and return its folder."""
    if isinstance(plan.data, ImageFolderData):
        plan.data.check_can_train()
    missing = missing_folders(Path(plan.settings.trainer.default_root_dir, "fit"))
    if plan.run is None:
        settings = plan.settings
        folder = Run(settings.trainer.default_root_dir, "fit", name=settings.name).choose()
    else:
        folder = plan.run
        hold(folder)
        log.info("continuing the cross-validation in %s", folder)
    wait_for_children(folder)
    plan = plan.put({"data.fold": None, "data.num_folds": None, "resume": False})
    if plan.run is not None:
        _check_changes(plan, folder)
    _write_beginning(folder, plan)
    for note in plan.notes:
        log.info("%s", note)
    if held := describe_held(plan.changes):
        log.info("%s", held)
    runs = RunDir(folder).folds
    for fold, run in enumerate(runs, 1):
        of_fold = _plan_of_fold(plan, folder, fold, run)
        if of_fold is None:
            log.info("fold %d of %d has ended: %s", fold, len(runs), run.path)
            continue
        log.info("fold %d of %d", fold, len(runs))
        with plan_file(of_fold) as file:
            code = _run(folder, ["fit", "--decided", str(file)])
        if code:
            _give_up(folder, missing)
            sys.exit(code)
    _conclude(folder, plan)
    return folder


def _plan_of_fold(plan: Plan, folder: Path, fold: int, run: RunDir) -> Plan | None:
    """Return the plan of the fit of a fold; None if it has nothing left to do.

    Args:
        plan: That of the cross-validation.
        folder: Its folder.
        fold: The number of the fold, from 1.
        run: The folder of its run.
    """
    can_go_on = run.has("last")
    if not can_go_on and _has_ended(run):
        return None
    values = {
        "trainer.default_root_dir": str(folder),
        "resume": str(run.path) if can_go_on else False,
        "name": None if can_go_on else run.path.name,
    }
    of_fold = replace(
        _with_fold(plan, fold).put(values),
        identity=replace(plan.identity, folds=None),
        run=None,
        start=None,
        changes={},
        notes=(),
    )
    if not can_go_on:
        return of_fold
    changes = _changes_of(run.path, of_fold)
    if _has_ended(run) and changes.keys() <= _PLACES:
        return None
    start = read_start(run.checkpoint("last"))
    return replace(of_fold, run=run.path, start=start, changes=changes)


def _with_fold(plan: Plan, fold: int) -> Plan:
    """Return the plan of a cross-validation with the images of a fold, which is counted from 1."""
    values = {"folds": None, "data.num_folds": plan.settings.folds, "data.fold": fold}
    return plan.put(values)


def _has_ended(run: RunDir) -> bool:
    """Return whether a fold has a test, without which the folds cannot be joined."""
    return run.has_ended and "test" in run.facts()


def _changes_of(run: Path, of_fold: Plan) -> Changes:
    """Return how a plan differs from the settings with which a fold has begun.

    Those of the cross-validation do not tell: a command that was killed may have changed them before this fold.
    """
    before = read_config("fit", str(run / "config.yaml"), "run")
    changes = changes_between(before.values, of_fold.settings)
    if of_fold.settings.trainer.precision is None:  # each fold has settled its own
        changes.pop("trainer.precision", None)
    return changes


def _check_changes(plan: Plan, folder: Path) -> None:
    """Check that all folds that have begun can go on with the settings of a plan, before these are written.

    Raises:
        ValueError: One cannot, so that the folds would differ in more than their images.
    """
    for fold, run in enumerate(RunDir(folder).folds, 1):
        if not run.has("last") and not _has_ended(run):
            continue  # it begins anew
        of_fold = _with_fold(plan, fold)
        changes = _changes_of(run.path, of_fold)
        if not changes:
            continue
        if not run.has("last"):
            check_not_prolonged(run.path, changes)
        start = read_start(run.checkpoint("last" if run.has("last") else "best"))
        trainer = of_fold.settings.trainer
        patience = of_fold.settings.patience
        limits = Limits(trainer.max_epochs, trainer.max_steps, patience)
        is_finished = not run.has("last") or bool(limits.reached(start.content))
        with only_errors("finetune.data"):  # the fold logs the same
            data = open_data(of_fold.settings.data)
            data.read()
        check_changes(start, data, changes, allow=None, is_finished=is_finished)


def _give_up(folder: Path, missing: Sequence[Path]) -> None:
    """Say how to continue after a fold that has failed; without a result delete the folder, as that of any run.

    Args:
        folder: The folder of the cross-validation.
        missing: Folders around it that did not exist before this command, innermost first. They are deleted, too.
    """
    if has_result(folder):
        log.warning("to continue: finetune fit --resume %s", shlex.quote(str(folder)))
        return
    release_run(folder)
    shutil.rmtree(folder, ignore_errors=True)
    remove_empty(missing)


def _run(folder: Path, arguments: Sequence[str]) -> int:
    """Run a command that writes into the folder of a cross-validation, and return its exit code."""
    return wait_for(start_command(arguments, pass_fds=descriptors_for_children(folder)))


def _write_beginning(folder: Path, plan: Plan) -> None:
    """Write how the cross-validation began, or went on, and its settings."""
    run = RunDir(folder)
    before = run.facts()
    if "command" in before:
        run.update(went_on_by=[*before.get("went_on_by", []), plan.command], ended=None)
    else:
        run.update(command=plan.command, folder=os.getcwd())
    identity = plan.identity.as_plain()
    place = place_of(arguments_in_effect(plan.settings.data))
    run.update(identity=identity, data=place, network=plan.settings.model.backbone)
    replace_text(folder / "config.yaml", plan.config)


def _conclude(folder: Path, plan: Plan) -> None:
    """Join the results of the folds, and print them."""
    runs = [read_run(run.path) for run in RunDir(folder).folds]
    predictions = [predictions_of(run) for run in runs]
    with only_errors("finetune.data"):  # the folds have logged the same
        data = open_data(plan.settings.data)
        data.read()
    checkpoint = folder / "checkpoints" / "best.ckpt"
    calibration = join_checkpoints(
        [run.path / "checkpoints" / "best.ckpt" for run in runs],
        predictions,
        checkpoint,
        data.fingerprint,
    )
    write_predictions([run.path for run in runs], folder / "predictions.csv")
    result = merged_result(runs, calibration)
    if "test" in data.splits and not data.splits["test"].is_drawn:
        result["test_folder"] = _test_together(folder, plan)
    write_result(folder / "test.json", result)
    headline = headline_of(result)
    RunDir(folder).update(
        **merged_about(runs),
        seconds=_seconds(runs),
        test=headline and headline.as_plain(),
        ended=now(),
    )
    _print_result(result, calibration.describe(result["class_names"])[1:])
    _report(folder, read_run(folder))
    if missed := calibration.describe_unreached_aim(result["class_names"]):
        raise ValueError(f"{missed}; {checkpoint} has no threshold for it")


def _test_together(folder: Path, plan: Plan) -> dict[str, Any]:
    """Return the result on the test folder of the networks of all folds together, on one device.

    Args:
        folder: The folder of the cross-validation.
        plan: Its plan, which names the data: a checkpoint may not choose an address, a pattern or a class of the user.
    """
    data = plan.settings.data
    trainer = plan.settings.trainer
    arguments = data_arguments(data)
    names = ("root", "table", "group_by", "batch_size", "num_workers")
    values = {f"data.{name}": arguments[name] for name in names if arguments.get(name) is not None}
    if isinstance(data, ClassSettings):
        values["data.class_path"] = data.class_path
    devices = str(trainer.devices).strip("[]").split(",")
    values |= {
        "ckpt_path": str(folder / "checkpoints" / "best.ckpt"),
        "trainer.default_root_dir": str(folder),
        "trainer.accelerator": trainer.accelerator,
        "trainer.precision": trainer.precision,
        "trainer.devices": 1 if len(devices) == 1 else [int(devices[0])],
    }
    log.info("testing the networks of all folds together on the test folder")
    run = evaluate(Layers("test", (Layer("finetune fit --folds", "python", values),)))
    assert run.path is not None, "a test has a folder"
    result = read_run(run.path).result
    kept = ("confusion_matrix", "label_counts", "test/mAP", INTERVAL, "test/exact_match")
    return {
        "run": f"test/{run.path.name}",
        **{name: result[name] for name in kept if name in result},
    }


def _seconds(runs: Sequence[RunRecord]) -> dict[str, float]:
    phases = dict.fromkeys(phase for run in runs for phase in run.seconds)
    return {phase: sum(run.seconds.get(phase, 0.0) for run in runs) for phase in phases}


def _print_result(result: dict[str, Any], thresholds: Sequence[str]) -> None:
    """Print the result over all images, and of each fold.

    Args:
        result: The content of test.json.
        thresholds: The thresholds of the networks of all folds together in words; empty if there are none.
    """
    rows = result["folds"]
    print(f"{headline_of(result)} Each image is in one of {len(rows)} folds.")
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
    if together := headline_of(result.get("test_folder", {})):
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
