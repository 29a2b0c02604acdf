"""Interrupted equals uninterrupted, bit for bit: weights, optimizer, schedule, Lightning's counters and metrics.

Killed by SIGKILL, and stopped by signals of which some processes hear alone: kill_scenarios.py, in forked processes.
Stopped by a signal at each point of a fit, or by a limit: in this process. On three processes: nightly/.
"""

import json
import os
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
from processes import launch
from promise import control, promise

from finetune.distributed.signals import Interrupted
from finetune.runs.folder import versions
from finetune.training.classifier import Classifier

STEPS_PER_EPOCH = 7  # of kill_scenarios.py
PARTS = ("weights", "optimizer", "scheduler", "loops", "steps", "epochs")


@promise("resume")
@control("resume")
@promise("kills")
@control("kills")
def test_killed_and_resumed_a_run_ends_bit_for_bit_as_an_uninterrupted_one(tmp_path):
    """In full, for many moments, two processes, signals and half-written files: below."""
    data = draw_colours(tmp_path / "data", train=30, test=4)
    results = json.loads(
        (
            launch("kill_scenarios.py", tmp_path / "out", 1, data, "quick") / "results.json"
        ).read_text()
    )
    killed, control = results["killed"], results["control"]
    assert (killed["ended"], killed["resumed"]) == ([-9], [0])
    assert killed["step"] % STEPS_PER_EPOCH and control["step"] % STEPS_PER_EPOCH  # inside an epoch
    assert [part for part in PARTS if not killed[part]] == []
    assert not control["weights"]  # an epoch that begins again


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("killed")
    data = draw_colours(root / "data", train=30, test=4)
    out = launch("kill_scenarios.py", root / "out", 1, data)
    return json.loads((out / "results.json").read_text())


# What ends all processes, and whether a step of last.ckpt can be that of the end. Checkpoints that wait are written at
# a signal, which here reaches the first of two processes alone, and are made again after a kill, two epochs later.
KILLED = {
    "killed_two": ([-9, -9], lambda step: step % STEPS_PER_EPOCH != 0),
    "killed_labels": ([-9], lambda step: step >= 9),
    "cut_off": ([-9], lambda step: step == 3),  # the first; half of the second lay next to it
    "closed_terminal": ([129, 129], lambda step: step % 3 != 0 or step % STEPS_PER_EPOCH == 0),
    "waiting_killed": ([-9], lambda step: step == STEPS_PER_EPOCH),
    "waiting_stopped": ([143, 143], lambda step: step > 2 * STEPS_PER_EPOCH),
}


@promise("resume")
@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_resume_after_a_kill_or_a_closed_terminal(killed, name):
    """At any moment: nightly/test_kills.py."""
    result, (codes, is_last) = killed[name], KILLED[name]
    assert result["ended"] == codes and result["resumed"] == [0] * len(codes)
    assert is_last(result["step"])
    assert [part for part in PARTS if not result[part]] == []
    if name == "cut_off":
        assert len(result["leftovers"]) == 1 and result["gone"] == []


@promise("resume")
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resume_with_another_number_of_processes(killed, before, after):
    result = killed[f"moved{before}to{after}"]
    assert result["ended"] == [143] * before and result["resumed"] == [0] * after
    assert result["step"] == STEPS_PER_EPOCH + 3  # inside an epoch
    for output, num in zip(result["said"], (before, after), strict=True):
        assert f"training: {num} x cpu, precision 64-true" in output
        assert "changed" not in output
    assert f"from step {result['step']}\n" in result["said"][1]
    stopped_at, end = result["distances"]
    assert stopped_at > 1e-3  # else there was nothing to do
    assert end <= 1e-10  # float64: rounding over 21 steps, far below any mistake
    assert killed["moved_control"]["resumed"] == [0]
    assert killed["moved_control"]["distances"][1] > 1e-4  # the epoch begun again


ACCUMULATED = ("--trainer.accumulate_grad_batches", "2")  # 3 steps an epoch
# 2 steps an epoch
GATHERING = ("--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "2")
OFTEN_VALIDATED = ("--trainer.val_check_interval", "2")
# Where SIGTERM comes, at which of 3 x 5 steps, and with how many steps behind it the fit ends; the kind of the labels.
# Inside an epoch, inside a validation, between epochs.
STOPS = [
    ("training_step", 1, 2, "single", ()),
    ("training_step", 6, 7, "several", ()),
    ("validation_step", 10, 10, "single", ()),
    ("on_train_epoch_end", 10, 10, "single", ()),
    ("on_train_epoch_end", 10, 10, "single", ("--trainer.max_steps", "13")),
    ("training_step", 3, None, "single", ACCUMULATED),
    ("validation_step", 2, None, "single", GATHERING),
    ("training_step", 2, 3, "single", OFTEN_VALIDATED),
    ("validation_step", 2, 2, "single", OFTEN_VALIDATED),
    ("on_train_epoch_end", 5, 5, "single", ("--trainer.check_val_every_n_epoch", "2")),
    ("training_step", 6, 7, "single", ("--model.members", "2")),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Half as many images as elsewhere, for 5 steps an epoch all the same."""
    root = tmp_path_factory.mktemp("data")
    table = write_table(draw_labelled(root / "labels" / "images", train=30, test=6))
    colours = draw_colours(root / "colours", train=10, test=2)
    return {"single": [colours], "several": [table]}


def trained(
    cli: Callable[..., None], data: list[Any], root: Path, stop: Any = None, *extra: str
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

    options = ["--batch", 6, "--trainer.max_epochs", 3, "--trainer.log_every_n_steps", 1]
    options += ["--model.scheduler", "finetune.WarmupCosine", "--test_after_fit", "false"]
    with hooked("training_step"), hooked("validation_step"), hooked("on_train_epoch_end"):
        cli("fit", *data, *QUICKEST, *options, "--out", root, *extra)
    return seen


def last(root: Path) -> tuple[dict[str, Any], str]:
    (run,) = versions(root, "fit")
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return checkpoint, (run / "steps.csv").read_text()


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        torch.equal(a["state_dict"][name], b["state_dict"][name]) for name in a["state_dict"]
    )


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
    (a, metrics_a), (b, metrics_b) = last(root), last(tmp_path)
    assert same_weights(a, b)
    assert a["loops"] == b["loops"]
    assert metrics_a == metrics_b
    rates = [
        [group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]]
        for checkpoint in (a, b)
    ]
    assert rates[0] == rates[1]


def stopping_early(patience: int) -> tuple[str, ...]:
    options = {"monitor": "val/loss", "min_delta": 100.0, "patience": patience}
    name = "pytorch_lightning.callbacks.EarlyStopping"
    return "--trainer.callbacks", json.dumps([{"class_path": name, "init_args": options}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "limit", "larger", "message"),
    [
        ((), ("--trainer.max_steps", "7"), ("--trainer.max_steps", "-1"), "trainer.max_steps 7"),
        ((), ("--trainer.max_epochs", "2"), (), "trainer.max_epochs 2"),
        (OFTEN_VALIDATED, stopping_early(2), stopping_early(9), "early stopping, patience 2"),
    ],
    ids=["steps", "epochs", "patience"],
)
def test_resume_with_a_larger_limit(  # noqa: PLR0913
    cli, images, tmp_path, full, caplog, extra, limit, larger, message
):
    """It ends as a run whose only limit is that of epochs. With the same limit it is finished."""
    extra = (*extra, "--model.scheduler", "null")  # else the rate would fall with the first length
    data = images["single"]
    trained(cli, data, tmp_path, None, *extra, *limit)
    ended = last(tmp_path)[0]
    assert trained(cli, data, tmp_path, None, *extra, *limit, "--resume") == []
    assert f"is finished, with {message}" in caplog.text
    assert same_weights(last(tmp_path)[0], ended)
    root, steps = full("single", *extra)
    after = trained(cli, data, tmp_path, None, *extra, *larger, "--resume")
    assert 0 < len(after) < len(steps) and after == steps[len(steps) - len(after) :]
    a, b = last(root)[0], last(tmp_path)[0]
    assert same_weights(a, b)
    assert a["loops"] == b["loops"]


@pytest.mark.slow
def test_control_with_the_patience_of_the_checkpoint_it_stops_at_the_next_validation(
    cli, images, tmp_path
):
    data = images["single"]
    trained(cli, data, tmp_path, None, *OFTEN_VALIDATED, *stopping_early(2))
    with patch("finetune.runs.model_checkpoint.keep_patience", lambda *_: None):
        limit = stopping_early(9)
        after = trained(cli, data, tmp_path, None, *OFTEN_VALIDATED, *limit, "--resume")
    assert len(after) == 2  # batches, between two validations


@pytest.mark.slow
def test_resume_starts_afresh_continues_and_knows_the_end(colours, cli, tmp_path, capsys, caplog):
    fit = ["fit", "--resume", "--data.root", colours, *QUICKEST]
    cli(*fit)
    first = (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").read_bytes()
    cli(*fit)
    assert "is finished" in caplog.text
    assert (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").read_bytes() == first
    cli(*fit, "--trainer.max_epochs", "2")  # the command line wins over the checkpoint
    assert [path.name for path in (tmp_path / "runs/fit").iterdir()] == ["version_0"]
    last = torch.load(tmp_path / "runs/fit/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 2
