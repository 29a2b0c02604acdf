"""Several fits whose networks are joined: the folds of a cross-validation, or the members of an ensemble.

They run one after another. Each fold tests another part of the images. The members have the same images in the same
order, and each its own random head.
"""

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from finetune.data.data_place import place_of
from finetune.data.datamodule import open_data
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.distributed.child_command import start_command, wait_for
from finetune.fitting.build import arguments_in_effect
from finetune.fitting.fit import print_end, print_next
from finetune.fitting.joined_fits import join_folds, join_members
from finetune.fitting.plan import Plan, plan_file
from finetune.fitting.resume import (
    LIMITS,
    Changes,
    changes_between,
    in_words,
    kind_of,
    read_start,
)
from finetune.runs.folder import Run
from finetune.runs.record import read_run
from finetune.runs.run_dir import RunDir, now
from finetune.runs.run_lock import (
    descriptors_for_children,
    hold,
    wait_for_children,
)
from finetune.settings.layers import read_config
from finetune.system.files import replace_text
from finetune.system.messages import WrongUsage, only_errors

log = logging.getLogger(__name__)


def fit_several(plan: Plan) -> Path:
    """Run or continue the fits of a plan, join them, and return the folder."""
    if isinstance(plan.data, ImageFolderData):
        plan.data.check_can_train()
    new = Run(plan.settings.trainer.default_root_dir, "fit", name=plan.settings.name)
    if plan.run is None:
        folder = new.choose()
    else:
        folder = plan.run
        hold(folder)
        log.info("continuing the %s in %s", plan.identity.kind, folder)
    wait_for_children(folder)
    if plan.run is not None:
        _check_changes(plan)
    plan = plan.put({"data.fold": None, "data.num_folds": None, "resume": False})
    _write_beginning(folder, plan)
    for note in plan.notes:
        log.info("%s", note)
    runs = RunDir(folder).fits
    what = "fold" if plan.settings.members is None else "member"
    for number, run in enumerate(runs, 1):
        of_fit = _plan_of_fit(plan, folder, number, run)
        if of_fit is None:
            log.info("%s %d of %d has ended: %s", what, number, len(runs), run.path)
            continue
        log.info("%s %d of %d", what, number, len(runs))
        with plan_file(of_fit) as file:
            code = _run(folder, ["fit", "--decided", str(file)])
        if code:
            new.discard_if_empty()
            if folder.exists():
                log.warning("to continue: finetune fit --resume %s", shlex.quote(str(folder)))
            sys.exit(code)
    _conclude(folder, plan)
    return folder


def _plan_of_fit(plan: Plan, folder: Path, number: int, run: RunDir) -> Plan | None:
    """Return the plan of one of the fits; None if it has nothing left to do.

    Args:
        plan: That of all of them.
        folder: Their folder.
        number: The number of the fit, from 1.
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
    of_fit = replace(
        _with_own_settings(plan, number).put(values),
        identity=structs.replace(plan.identity, folds=None, members=None),
        is_part=True,
        run=None,
        start=None,
        changes={},
        notes=(),
    )
    if not can_go_on:
        return replace(of_fit, begins_again=run.is_run)
    changes = _changes_of(run.path, of_fit)
    if _has_ended(run) and not changes:
        return None
    start = read_start(run.checkpoint("last"))
    return replace(of_fit, run=run.path, start=start, changes=changes)


def _with_own_settings(plan: Plan, number: int) -> Plan:
    """Return the plan with the images of a fold, or the random head of a member; both are counted from 1."""
    settings = plan.settings
    if settings.members is None:
        values = {"folds": None, "data.num_folds": settings.folds, "data.fold": number}
        return plan.put(values)
    seed = (settings.seed_everything + number - 1) % 2**32
    # the members are tested together
    return plan.put({"members": None, "model.init_seed": seed, "test_after_fit": False})


def _has_ended(run: RunDir) -> bool:
    """Return whether a fit is complete. Only folds are tested, and cannot be joined without it."""
    is_member = run.path.name.startswith("member")
    return run.has_ended and (is_member or (run.path / "test.json").is_file())


def _changes_of(run: Path, of_fit: Plan) -> Changes:
    """Return how a plan differs from the settings with which a fit has begun, apart from the place of its images.

    Those of the folder do not tell: a command that was killed may have changed them before this fit.
    """
    before = read_config("fit", str(run / "config.yaml"), "run")
    changes = changes_between(before.values, of_fit.settings)
    if of_fit.settings.trainer.precision is None:  # each fit has settled its own
        changes.pop("trainer.precision", None)
    return {name: pair for name, pair in changes.items() if kind_of(name) != "images"}


def _check_changes(plan: Plan) -> None:
    """Check that the fits go on as they began: only their length may change, and what has no effect on the result.

    Raises:
        ValueError: They would differ in more, so that their networks and results cannot be joined.
    """
    assert plan.run is not None and plan.data is not None, "of a run that continues"
    changed = {
        name: pair
        for name, pair in plan.changes.items()
        if name not in LIMITS and kind_of(name) in ("changes", "order")
    }
    if changed:
        raise ValueError(
            f"the run would go on with {in_words(changed)}, and all its fits must have the same settings: keep the old "
            "value, or begin a new run without --resume"
        )
    if RunDir(plan.run).facts.fingerprint != plan.data.fingerprint:
        raise ValueError(
            "the run would train or validate on other images, labels or groups: restore them, or begin a new run "
            "without --resume"
        )
    limits = {name: pair for name, pair in plan.changes.items() if name in LIMITS}
    for run in RunDir(plan.run).fits:
        if limits and _has_ended(run) and not run.has("last"):
            raise WrongUsage(
                f"{run.path} cannot continue with {in_words(limits)}: its last.ckpt was deleted (--keep_last false)"
            )


def _run(folder: Path, arguments: Sequence[str]) -> int:
    """Run a command that writes into the folder of several fits, and return its exit code."""
    return wait_for(start_command(arguments, pass_fds=descriptors_for_children(folder)))


def _write_beginning(folder: Path, plan: Plan) -> None:
    """Write how the fits began, or went on, and their settings."""
    # Before run.json: only with its settings can a run go on.
    replace_text(folder / "config.yaml", plan.config)
    run = RunDir(folder)
    facts: dict[str, Any] = {"command": plan.command, "folder": os.getcwd()}
    if run.facts.command:
        facts = {"went_on_by": [*run.facts.went_on_by, plan.command], "ended": None}
    run.update(
        **facts,
        identity=plan.identity,
        asked=plan.asked_otherwise,
        data=place_of(arguments_in_effect(plan.settings.data)),
        network=plan.settings.model.backbone,
        fingerprint=None if plan.data is None else plan.data.fingerprint,
    )


def _conclude(folder: Path, plan: Plan) -> None:
    """Join the networks and the results of all fits, and print them."""
    runs = [read_run(run.path) for run in RunDir(folder).fits]
    with only_errors("finetune.data"):  # the fits have logged the same
        data = open_data(plan.settings.data)
        data.read()
    RunDir(folder).update(seconds=sum(run.facts.seconds for run in runs))
    join = join_folds if plan.settings.members is None else join_members
    calibration, facts = join(folder, plan, runs, data)
    RunDir(folder).update(**facts, ended=now())
    print_end(read_run(folder), str(folder), plan.settings.report)
    print_next(str(folder))
    if missed := calibration.describe_unreached_aim(data.class_names):
        best = RunDir(folder).checkpoint("best")
        raise ValueError(f"{missed}; {best} has no threshold for it")
