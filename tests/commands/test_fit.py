"""The start and end of a fit: which checkpoint it continues and tests, and a fit with nothing left to do."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import yaml
from colours import QUICKEST
from processes import finetune, run_script
from run_holders import another

from finetune.commands.fit import _print_finished
from finetune.runs import run_lock
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.licence import licence
from finetune.runs.metrics_csv import read_metrics

KILLED_REPORT = Path(__file__).parents[1] / "support/killed_report.py"


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_fit_tests_the_best_checkpoint(colours, cli, tmp_path):
    """Here that of the first epoch of three; the control: the last one's result is another."""
    with patch("finetune.runs.model_checkpoint.lowest_acceptable", side_effect=[0.0, 2.0, 2.0]):
        cli("fit", "--data.root", colours, *QUICKEST, "--trainer.max_epochs", 3)
    folder = tmp_path / "runs/fit/version_0"
    assert [
        read_checkpoint(folder / f"checkpoints/{name}.ckpt")["epoch"] for name in ("best", "last")
    ] == [0, 2]
    tested = {}
    for i, name in enumerate(("best", "last")):
        options = ["--data.num_workers", 0, "--trainer.accelerator", "cpu"]
        cli("test", "--ckpt_path", folder / f"checkpoints/{name}.ckpt", *options)
        tested[name] = json.loads((tmp_path / f"runs/test/version_{i}/test.json").read_text())[
            "test/loss"
        ]
    result = json.loads((folder / "test.json").read_text())
    assert result["test/loss"] == tested["best"] != tested["last"]
    assert result["checkpoint"].endswith("best.ckpt")


@pytest.mark.slow
def test_a_run_began_from_another_says_so_and_its_config_starts_afresh(
    colours, cli, tmp_path, run_to_go_on
):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    last = run_to_go_on / "checkpoints/last.ckpt"
    cli(*fit, "--ckpt_path", "runs/fit/version_0/checkpoints/last.ckpt", "--trainer.max_epochs", 2)
    for epochs in (2, 3):  # as it began, and gone on with
        run = tmp_path / "runs/fit/version_1"
        checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        assert checkpoint["finetune"]["began_from"] == str(last)
        terms = checkpoint["finetune"]["licence_of_the_weights"]
        assert terms.startswith("the checkpoint last.ckpt, ") and terms.endswith(
            licence(None, "small_cnn")
        )
        assert (run / "config.yaml").read_text().startswith(f"# It began from {last}\n")
        if epochs == 2:
            cli(*fit, "--resume", "--trainer.max_epochs", 3)
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 3
    cli("fit", "--config", run / "config.yaml", "--trainer.max_epochs", 1)
    again = tmp_path / "runs/fit/version_2"
    assert "It began from" not in (again / "config.yaml").read_text()
    weights = [
        torch.load(p / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for p in (last.parents[1], again)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_a_finished_run_is_reported_once_and_not_by_each_rank(is_rank_zero, caplog, capsys):
    trainer = SimpleNamespace(is_global_zero=is_rank_zero)
    parts = SimpleNamespace(
        trainer=trainer,
        model=SimpleNamespace(is_solved=False),
        run=SimpleNamespace(place="runs/fit/version_0"),
    )
    with caplog.at_level("INFO", "finetune"):
        _print_finished(parts, "trainer.max_epochs 1")
    assert caplog.text.count("is finished, with trainer.max_epochs 1") == int(is_rank_zero)
    assert capsys.readouterr().out == ("run in runs/fit/version_0\n" if is_rank_zero else "")


@pytest.mark.slow
def test_a_run_that_died_before_its_first_checkpoint_is_reported(colours, cli, tmp_path, caplog):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false", "--resume"]
    cli(*fit)
    (tmp_path / "runs/fit/version_1").mkdir()
    with caplog.at_level("INFO", "finetune"):
        cli(*fit)
    assert (
        "version_0 is finished, with trainer.max_epochs 1, and runs/fit/version_1 ended before its"
        in caplog.text
    )
    assert caplog.text.count("found no run with a last.ckpt") == 1  # the first run
    assert (tmp_path / "runs/fit/version_2/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_a_prolonged_run_is_tested_again_and_keeps_no_result_of_the_shorter_one(
    colours, cli, run_to_go_on
):
    fit = ["fit", "--resume", "--data.root", colours, *QUICKEST, "--test_after_fit", "true"]
    cli(*fit)  # finished, but not tested
    results, predictions = run_to_go_on / "test.json", run_to_go_on / "test_predictions.csv"
    assert "test/accuracy" in results.read_text() and predictions.exists()
    results.write_text("of the best after one epoch")
    cli(*fit)  # finished: nothing is done
    assert results.read_text() == "of the best after one epoch"
    best = run_to_go_on / "checkpoints/best.ckpt"
    # as if the run had been prolonged, and killed before its test
    os.utime(best, (results.stat().st_mtime + 1,) * 2)
    cli(*fit)
    assert "test/accuracy" in results.read_text()
    cli(*fit, "--trainer.max_epochs", 2, "--test_after_fit", "false")
    assert not results.exists() and not predictions.exists()
    cli(*fit, "--trainer.max_epochs", 2)
    assert "test/accuracy" in results.read_text() and predictions.exists()


@pytest.mark.slow
def test_a_finished_run_that_another_process_tests_is_left_to_it(colours, cli, run_to_go_on):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "true"]
    first = another(run_to_go_on)
    assert first.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"another process, {first.pid}"):
        cli(*fit, "--resume")
    assert not (run_to_go_on / "test.json").exists()
    first.kill()
    first.communicate(timeout=60)
    cli(*fit, "--resume")
    assert (run_to_go_on / "test.json").exists()
    run_lock.release()
    first = another(run_to_go_on)
    assert first.stdout.readline() == "held\n"
    cli(*fit, "--resume")  # nothing is left to do, whoever is there
    first.kill()
    first.communicate(timeout=60)


@pytest.mark.slow
def test_a_finished_run_is_tested_at_its_end_and_its_last_is_its_best(colours, cli, tmp_path):
    fit = [
        "fit",
        "--data.root",
        colours,
        *QUICKEST,
        "--data.val_fraction",
        "0",
        "--trainer.max_epochs",
        2,
    ]
    cli(*fit, "--test_after_fit", "false")
    run = tmp_path / "runs/fit/version_0"
    best, last = run / "checkpoints/best.ckpt", run / "checkpoints/last.ckpt"
    # as after the first epoch, and killed between the two files at the end of the second
    best.unlink()
    other = ["--trainer.default_root_dir", "other"]
    cli(*fit[:-1], 1, *other, "--test_after_fit", "false")
    best.write_bytes((tmp_path / "other/fit/version_0/checkpoints/best.ckpt").read_bytes())
    os.utime(best, (last.stat().st_mtime - 9,) * 2)
    cli(*fit, "--resume", "--test_after_fit", "true")
    assert read_checkpoint(best)["global_step"] == read_checkpoint(last)["global_step"]
    (row,) = [row for row in read_metrics(run / "steps.csv") if row.get("test/loss")]
    cli(*fit, *other)
    (full,) = [row for row in read_metrics("other/fit/version_1/steps.csv") if row.get("test/loss")]
    assert (row["step"], row["epoch"], row["test/loss"]) == (
        full["step"],
        full["epoch"],
        full["test/loss"],
    )
    cli(*fit[:-1], 3, "--resume", "--test_after_fit", "true")
    # that of before is gone
    (row,) = [row for row in read_metrics(run / "steps.csv") if row.get("test/loss")]
    assert int(row["step"]) == read_checkpoint(last)["global_step"]


@pytest.mark.slow
def test_patience_ends_a_fit(colours, cli, tmp_path, caplog):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--trainer.max_epochs", 20, "--patience", 2]
    cli(*fit, "--model.optimizer.lr", "1e-12")  # nothing is learned
    assert (
        "stopped after epoch 3: val/accuracy did not improve in --patience 2 validations"
        in caplog.messages
    )
    last = torch.load(tmp_path / "runs/fit/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 3
    caplog.clear()
    more = [*fit[:-4], "--trainer.max_epochs", 4, "--patience", 5, "--resume"]
    cli(*more, "--model.optimizer.lr", "1e-12")
    # its epochs are over
    assert not [reported for reported in caplog.messages if reported.startswith("ended after")]


@pytest.mark.slow
def test_a_fit_without_a_length_writes_the_usual_one_down(colours, cli, tmp_path, caplog):
    options = [option for option in QUICKEST if option not in ("--trainer.max_epochs", "1")]
    assert len(options) == len(QUICKEST) - 2
    limits = ["--trainer.limit_train_batches", 1, "--trainer.check_val_every_n_epoch", 50]
    cli("fit", "--data.root", colours, *options, "--test_after_fit", "false", *limits)
    assert caplog.messages[0].startswith("50 epochs, 50 steps, as is usual for ")
    config = yaml.safe_load((tmp_path / "runs/fit/version_0/config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 50


def test_a_split_that_a_limit_leaves_out_is_reported(colours, cli, tmp_path, caplog, capsys):
    limits = ["--trainer.limit_val_batches", 0, "--trainer.limit_test_batches", "0.0"]
    with caplog.at_level("INFO", "finetune"):
        cli("fit", "--data.root", colours, *QUICKEST, *limits)
    assert (
        "val is skipped, because trainer.limit_val_batches is 0: best.ckpt is the last epoch"
        in caplog.messages
    )
    assert "test is skipped, because trainer.limit_test_batches is 0" in caplog.messages
    run = tmp_path / "runs/fit/version_0"
    assert (run / "checkpoints/best.ckpt").samefile(run / "checkpoints/last.ckpt")
    assert not (run / "test.json").exists()
    assert capsys.readouterr().out.splitlines() == [
        "no temperature: nothing was validated, so the probabilities are not calibrated",
        "run in runs/fit/version_0",
        "next: finetune predict runs/fit/version_0 IMAGES",
    ]


@pytest.mark.slow
def test_a_run_that_was_killed_during_its_report_gets_it_by_the_same_command(colours, tmp_path):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--report", "true", "--resume"]
    fit += ["--test_after_fit", "true", "--trainer.default_root_dir"]
    killed = run_script(KILLED_REPORT, *fit, tmp_path / "killed", cwd=tmp_path)
    run = tmp_path / "killed/fit/version_0"
    assert killed.returncode == -signal.SIGKILL
    assert list(run.glob(".report.html.*.tmp")) and (run / "test.json").exists()
    for place in ("killed", "undisturbed"):
        done = finetune(*fit, tmp_path / place, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "test accuracy" in (run / "report.html").read_text("utf-8")
    assert names_in(tmp_path / "killed") == names_in(tmp_path / "undisturbed")
