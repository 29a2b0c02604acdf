"""The weights that a fit from a fitted head keeps at its end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from colours import QUICKEST
from processes import finetune
from promise import promise

from finetune.cli import run as run_command
from finetune.runs import run_lock
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.runs.folder import versions
from finetune.runs.record import read_run
from finetune.training import best_weights
from finetune.training.best_weights import interpolate

PROBE = ("--model.head_init", "probe", "--trainer.precision", "64-true")
# a rate at which the network forgets everything
RUIN = ("--model.optimizer", "SGD", "--model.optimizer.lr", "1")


TWO_EPOCHS = (*QUICKEST, *PROBE, "--trainer.max_epochs", "2")


@pytest.fixture(scope="module")
def runs(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        run_command(["fit", str(colours), *TWO_EPOCHS])
        run_lock.release()
        return Path("runs").absolute()


@pytest.fixture
def finished(runs: Path, cli: Callable[..., None], tmp_path: Path) -> None:
    """A copy of it, where `finetune` in this process would have made it."""
    shutil.copytree(runs, tmp_path / "runs")


def checkpoint(name: str, run: Path | None = None) -> dict:
    return read_checkpoint((run or versions("runs", "fit")[-1]) / f"checkpoints/{name}.ckpt")


@promise("best-weights")
def test_the_best_weights_lie_between_the_start_and_the_end(cli, colours, capsys):
    cli("fit", colours, *QUICKEST, *PROBE, "--trainer.max_epochs", 1)
    best, start, last = (checkpoint(name) for name in ("best", "start", "last"))
    kept = best["finetune"]["interpolation"]
    assert start["global_step"] == 0 and "interpolation" not in last["finetune"]
    expected = interpolate(start["state_dict"], last["state_dict"], kept["share"])
    assert all(value.equal(expected[name]) for name, value in best["state_dict"].items())
    moved = [
        name
        for name, value in last["state_dict"].items()
        if not value.equal(start["state_dict"][name])
    ]
    assert len(moved) == 6  # all weights and biases trained
    run = versions("runs", "fit")[-1]
    assert json.loads((run / "test.json").read_text())["interpolation"] == kept
    kept_in_run = read_run(run).facts.best
    assert kept_in_run.share == kept["share"] and "by the loss on" in kept_in_run.why
    assert kept_in_run.why in capsys.readouterr().out
    cli("validate", run / "checkpoints/best.ckpt", "--data.root", colours, "--data.num_workers", 0)
    measured = json.loads((versions("runs", "validate")[-1] / "val.json").read_text())
    chosen = next(one for one in kept["candidates"] if one["share"] == kept["share"])
    assert measured["val/accuracy"] == pytest.approx(chosen["accuracy"], abs=1e-7)


def keep_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_weights, "choose", lambda losses: len(losses) - 1)


@promise("best-weights", controls=[keep_the_end])
def test_a_fit_that_harms_keeps_the_start(cli, colours):
    options = ["--trainer.max_epochs", 3, "--data.val_fraction", 0.4]
    cli("fit", colours, *QUICKEST, *PROBE, *RUIN, *options)
    best, start = checkpoint("best"), checkpoint("start")
    assert best["finetune"]["interpolation"]["share"] == 0
    assert all(value.equal(start["state_dict"][name]) for name, value in best["state_dict"].items())


@pytest.mark.slow
def test_resume_makes_the_choice_that_a_kill_prevented(cli, colours, finished):
    fit = ("fit", colours, *TWO_EPOCHS)
    run = versions("runs", "fit")[-1]
    best, last = checkpoint("best"), checkpoint("last")
    AtomicCheckpointIO().save_checkpoint(last, run / "checkpoints/best.ckpt")
    (run / "test.json").unlink()
    cli(*fit, "--resume")
    assert versions("runs", "fit") == [run] and (run / "test.json").exists()
    again = checkpoint("best")
    assert again["finetune"]["interpolation"] == best["finetune"]["interpolation"]
    assert all(value.equal(best["state_dict"][name]) for name, value in again["state_dict"].items())
    cli(*fit, "--resume")  # nothing is left to do
    assert checkpoint("best")["finetune"]["interpolation"] == best["finetune"]["interpolation"]


@pytest.mark.slow
def test_freeze_batch_norm_false_makes_the_ends_the_only_candidates(cli, colours):
    network = ("--model.backbone", "timm/test_resnet", "--data.image_size", 32)
    cli("fit", colours, *QUICKEST, *PROBE, *network, "--model.freeze_batch_norm", "false")
    assert [
        one["share"] for one in checkpoint("best")["finetune"]["interpolation"]["candidates"]
    ] == [0.0, 1.0]
    cli("fit", colours, *QUICKEST, *PROBE, *network)
    statistics = [
        name
        for name in checkpoint("last")["state_dict"]
        if name.endswith(("running_mean", "running_var"))
    ]
    assert statistics  # kept where nobody says otherwise, with a head that was fitted on them
    for name in statistics:
        assert checkpoint("last")["state_dict"][name].equal(checkpoint("start")["state_dict"][name])


@pytest.mark.slow
def test_two_devices_keep_the_weights_of_one(colours, tmp_path, finished):
    one = checkpoint("best")
    process = finetune("fit", colours, *TWO_EPOCHS, "--trainer.devices", 2, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    two = checkpoint("best")
    assert two["finetune"]["interpolation"]["share"] == one["finetune"]["interpolation"]["share"]
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_resume_with_a_damaged_start_says_what_to_do(cli, colours, finished):
    fit = ("fit", colours, *TWO_EPOCHS)
    run = versions("runs", "fit")[-1]
    start = run / "checkpoints/start.ckpt"
    start.write_bytes(start.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"delete it, .*--resume {run}"):
        cli(*fit, "--resume", "--trainer.max_epochs", 3)
    start.unlink()
    cli("fit", "--resume", run)
    assert (run / "test.json").exists() and checkpoint("best")["finetune"].get(
        "interpolation"
    ) is None


def test_without_validation_the_last_weights_are_kept_and_tested_once(cli, colours, caplog):
    fit = ("fit", colours, *QUICKEST, *PROBE, "--data.val_fraction", 0)
    cli(*fit)
    run = versions("runs", "fit")[-1]
    assert checkpoint("best")["finetune"].get("interpolation") is None
    assert read_run(run).facts.best is None
    written = (run / "test.json").stat().st_mtime_ns
    with caplog.at_level("INFO", logger="finetune"):
        cli(*fit, "--resume")
    assert "is finished" in caplog.text and "val/accuracy" not in caplog.text
    assert (run / "test.json").stat().st_mtime_ns == written
