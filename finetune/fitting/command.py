"""`finetune fit`: decide, then one fit, or those of a cross-validation."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from finetune.distributed.signals import is_rank_zero
from finetune.fitting.command_process import stopped_at_once
from finetune.fitting.decide import decide
from finetune.fitting.fit import fit
from finetune.fitting.folds import fit_folds
from finetune.fitting.plan import Plan, answer, read_plan
from finetune.settings.layers import Layers


def run_fit(layers: Layers, typed: Sequence[str], began: float) -> None:
    """Decide a fit, and do it.

    Args:
        layers: Who has set what.
        typed: The command line, for run.json.
        began: `time.monotonic` when the command began.
    """
    with stopped_at_once():
        carry_out(decide(layers, shlex.join(["finetune", *typed]), began))


def run_decided(file: str) -> None:
    """Do the fit of a plan that another process has written, as one of its devices, a fold, or for a Python program."""
    with stopped_at_once():
        run = carry_out(read_plan(Path(file)))
    if is_rank_zero():
        answer(Path(file), "run", str(run.absolute()))


def carry_out(plan: Plan) -> Path:
    """Do what a plan says, and return the folder of its run."""
    if plan.settings.folds is not None:
        return fit_folds(plan)
    run = fit(plan).run.path
    assert run is not None, "a fit that has ended has a folder"
    return run
