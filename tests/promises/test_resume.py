"""Interrupted equals uninterrupted, bit for bit: weights, optimizer, schedule, Lightning's counters and metrics.

Stopped by a signal at each point of a fit, or by a limit: in this process. Killed, and on two processes: forked ones.
Killed while something is written: nightly/test_kills.py.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from colours import QUICKEST, draw_colours
from labelled_files import draw_labelled
from labelled_runs import write_table
from promise import control, promise
from scenario_results import distance
from stopped_fits import differing, fitted, state
from tiers import sweep

from finetune.distributed.signals import Interrupted
from finetune.runs.folder import versions
from finetune.training.classifier import Classifier

FIT = [*QUICKEST, "--batch", 6, "--trainer.max_epochs", 3, "--trainer.log_every_n_steps", 1]
FIT += ["--model.scheduler", "finetune.WarmupCosine", "--test_after_fit", "false"]
FIT += ["--coverage", 0.5]
STEPS_PER_EPOCH = 5


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Images for 5 steps an epoch, with one label each or several."""
    root = tmp_path_factory.mktemp("data")
    table = write_table(draw_labelled(root / "labels" / "images", train=30, test=6))
    return {"single": draw_colours(root / "colours", train=10, test=2), "several": table}


def only(root: Path) -> Path:
    (run,) = versions(root, "fit")  # resumed, so still the one run
    return run


# Killed, or stopped where another process does not hear of it

AT = 8  # the step before which a signal comes, and 6 that of the last checkpoint in that epoch
KILLED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "ctrl-c": ("single", {"signum": signal.SIGINT}, [130]),
    "sigkill": ("single", {}, [-9]),
    "sigkill of three": ("single", {"num_processes": 3}, [-9] * 3),
    "sigkill, several labels": ("several", {}, [-9]),
    "closed terminal of two": (
        "single",
        {"num_processes": 2, "signum": signal.SIGHUP},
        [129, 129],
    ),
    "sigterm of one of two, slow disk": (
        "single",
        {"num_processes": 2, "signum": signal.SIGTERM, "num_hearing": 1, "has_slow_disk": True},
        [143, 143],
    ),
}


def words_of(root: Path, data: Path, *extra: Any) -> list[Any]:
    return ["fit", data, *FIT, "--out", root, "--resume", *extra]


def forked(root: Path, data: Path, *extra: Any, **how: Any) -> list[int]:
    often = ["--checkpoint_every_n_steps", 10**6 if how.get("has_slow_disk") else 3]
    return fitted(root, *words_of(root, data, *often, *extra), **how)


@pytest.fixture(scope="module")
def uninterrupted(images, tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """The state in which a fit ends that nothing stops; each is run once."""
    known: dict[Any, dict[str, Any]] = {}

    def run(kind: str, num: int, *extra: Any) -> dict[str, Any]:
        if (kind, num, extra) not in known:
            root = tmp_path_factory.mktemp("whole")
            assert forked(root, images[kind], *extra, num_processes=num) == [0] * num
            known[kind, num, extra] = state(only(root))
        return known[kind, num, extra]

    return run


@promise("resume")
@control("resume")
@promise("kills")
@control("kills")
@pytest.mark.parametrize("name", sweep(KILLED, quick=["ctrl-c", "sigkill"]))
def test_resume_after_ctrl_c_or_a_kill_ends_bit_for_bit_as_an_uninterrupted_fit(
    images, uninterrupted, tmp_path, name
):
    kind, how, codes = KILLED[name]
    num = how.get("num_processes", 1)
    root = tmp_path / "killed"
    assert forked(root, images[kind], step=AT, **how) == codes
    step = torch.load(only(root) / "checkpoints/last.ckpt", weights_only=True)["global_step"]
    # the step before the signal, or the last checkpoint in this epoch
    assert step == (AT - AT % 3 if -9 in codes else AT + 1) and step % STEPS_PER_EPOCH
    again = Path(shutil.copytree(root, tmp_path / "again"))
    assert forked(root, images[kind], num_processes=num) == [0] * num
    expected = uninterrupted(kind, num)
    assert differing(state(only(root)), expected) == []
    if name == "sigkill":  # the control: an epoch that begins again
        assert forked(again, images[kind], mistake="start_the_epoch_again") == [0]
        assert "weights" in differing(state(only(again)), expected)


@control("resume")
@pytest.mark.slow
def test_control_the_buckets_of_ddp_round_sums_of_three_gradients_otherwise(images, tmp_path):
    """Sums of two have the same rounding in any order."""
    how = {"num_processes": 3, "mistake": "leave_the_buckets_of_ddp"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert forked(whole, images["single"], **how) == [0] * 3
    assert forked(killed, images["single"], step=AT, **how) == [-9] * 3
    assert forked(killed, images["single"], **how) == [0] * 3
    assert "weights" in differing(state(only(killed)), state(only(whole)))


FLOAT64 = ("--trainer.precision", "64-true")


@promise("resume")
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resume_with_another_number_of_processes(images, uninterrupted, tmp_path, before, after):
    data, root = images["single"], tmp_path / "moved"
    stopped = {"step": AT, "signum": signal.SIGTERM, "num_processes": before}
    assert forked(root, data, *FLOAT64, **stopped) == [143] * before
    expected = uninterrupted("single", 1, *FLOAT64)["weights"]
    # else there was nothing to do
    assert distance(state(only(root))["weights"], expected) > 1e-3
    again = Path(shutil.copytree(root, tmp_path / "again"))
    assert forked(root, data, *FLOAT64, num_processes=after) == [0] * after
    log = (root / "log0").read_text()
    for num in (before, after):
        assert f"training: {num} x cpu, precision 64-true" in log
    assert f"from step {AT + 1}\n" in log and "changed" not in log
    # float64: rounding over 15 steps, far below any mistake
    assert distance(state(only(root))["weights"], expected) <= 1e-10
    if after == 1:  # the control: the epoch begun again
        assert forked(again, data, *FLOAT64, mistake="start_the_epoch_again") == [0]
        assert distance(state(only(again))["weights"], expected) > 1e-4


# Stopped at each point of a fit, and by a limit

ACCUMULATED = ("--trainer.accumulate_grad_batches", "2")  # 3 steps an epoch
GATHERING = ("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "2")
OFTEN_VALIDATED = ("--trainer.val_check_interval", "2")
# Where SIGTERM comes, at which of 3 x 5 steps, and with how many steps behind it the fit ends; the kind of the labels.
# Inside an epoch, inside a validation, between epochs.
STOPS = [
    ("training_step", 1, 2, "single", ()),
    ("training_step", 6, 7, "several", ()),
    ("validation_step", 10, 10, "single", ()),
    ("on_train_epoch_end", 10, 10, "single", ("--trainer.max_steps", "13")),
    ("training_step", 3, None, "single", ACCUMULATED),
    ("validation_step", 2, None, "single", GATHERING),
    ("validation_step", 2, 2, "single", OFTEN_VALIDATED),
    ("on_train_epoch_end", 5, 5, "single", ("--trainer.check_val_every_n_epoch", "2")),
]


def trained(
    cli: Callable[..., None], data: Path, root: Path, stop: Any = None, *extra: str
) -> list[Any]:
    """Fit with SIGTERM at `stop`, a hook and a step, and return (epoch, batch, images) of each step."""
    seen = []
    sent = []

    def hooked(name: str) -> Any:
        original = getattr(Classifier, name)

        def hook(self: Classifier, *arguments: Any) -> Any:
            if name == "training_step":
                batch, batch_idx = arguments
                seen.append((self.trainer.current_epoch, batch_idx, batch["index"].tolist()))
            if stop == (name, self.trainer.global_step) and not sent:
                sent.append(name)
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, *arguments)

        return patch.object(Classifier, name, hook)

    with hooked("training_step"), hooked("validation_step"), hooked("on_train_epoch_end"):
        cli("fit", data, *FIT, "--out", root, *extra)
    return seen


@pytest.fixture(scope="module")
def whole() -> dict[Any, tuple[Path, list[Any]]]:
    return {}


@pytest.fixture
def full(cli, images, whole, tmp_path_factory) -> Callable[..., tuple[Path, list[Any]]]:
    """Runs that nothing stops, and their steps; each kind is trained once."""

    def run(kind: str, *extra: str) -> tuple[Path, list[Any]]:
        if (kind, extra) not in whole:
            root = tmp_path_factory.mktemp("whole")
            whole[kind, extra] = root, trained(cli, images[kind], root, None, *extra)
        return whole[kind, extra]

    return run


@promise("resume")
@pytest.mark.slow
@pytest.mark.parametrize(("hook", "at", "num_before", "kind", "extra"), STOPS)
def test_resume_after_sigterm_wherever_it_comes(  # noqa: PLR0913
    cli, images, tmp_path, full, hook, at, num_before, kind, extra
):
    root, steps = full(kind, *extra)
    with pytest.raises(Interrupted) as caught:
        trained(cli, images[kind], tmp_path, (hook, at), *extra)
    assert caught.value.exit_code == 143
    after = trained(cli, images[kind], tmp_path, None, *extra, "--resume")
    assert 0 < len(after) < len(steps) and after == steps[len(steps) - len(after) :]
    if num_before is not None:
        assert len(steps) - len(after) == num_before
    assert differing(state(only(tmp_path)), state(only(root))) == []


# nothing is learned, so that the accuracy does not improve
STOPPING_EARLY = (*OFTEN_VALIDATED, "--lr", "1e-12")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "limit", "larger", "message"),
    [
        ((), ("--trainer.max_steps", "7"), ("--trainer.max_steps", "-1"), "trainer.max_steps 7"),
        (
            STOPPING_EARLY,
            ("--patience", "2"),
            ("--patience", "9"),
            "early stopping, patience 2",
        ),
    ],
    ids=["steps", "patience"],
)
def test_resume_with_a_larger_limit(  # noqa: PLR0913
    cli, images, tmp_path, full, caplog, extra, limit, larger, message
):
    """It ends as a run whose only limit is that of epochs. With the same limit it is finished."""
    extra = (*extra, "--model.scheduler", "null")  # else the rate would fall with the first length
    data = images["single"]
    trained(cli, data, tmp_path, None, *extra, *limit)
    ended = state(only(tmp_path))
    assert trained(cli, data, tmp_path, None, *extra, *limit, "--resume") == []
    assert f"is finished, with {message}" in caplog.text
    assert differing(state(only(tmp_path)), ended) == []
    root, steps = full("single", *extra)
    after = trained(cli, data, tmp_path, None, *extra, *larger, "--resume")
    assert 0 < len(after) < len(steps) and after == steps[len(steps) - len(after) :]
    changed = differing(state(only(tmp_path)), state(only(root)))
    assert {"weights", "loops", "optimizer"}.isdisjoint(changed)


@pytest.mark.slow
def test_resume_with_more_patience_counts_the_validations_of_the_run_before(cli, images, tmp_path):
    data = images["single"]
    trained(cli, data, tmp_path, None, *STOPPING_EARLY, "--patience", "2")
    after = trained(cli, data, tmp_path, None, *STOPPING_EARLY, "--patience", "3", "--resume")
    assert len(after) == 2  # batches, between two validations
