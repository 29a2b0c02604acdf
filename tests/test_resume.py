"""Interrupted equals uninterrupted, bit for bit: weights, optimizer, schedule, Lightning's counters and metrics.csv."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import draw_colours

from finetune.classifier import Classifier
from finetune.runs import versions
from finetune.signals import Interrupted, SignalFlag

EVERYTHING = ("weights", "optimizer", "scheduler", "loops", "metrics")
STEPS_PER_EPOCH = 7


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("killed")
    data = draw_colours(out / "data", train=30, test=4)
    script = Path(__file__).with_name("kill_scenarios.py")
    process = subprocess.run([sys.executable, script, out, data], capture_output=True, text=True, timeout=400)
    logs = "\n".join(f"{path}: {path.read_text()[-600:]}" for path in out.glob("*/log*"))
    assert process.returncode == 0, process.stderr + logs
    return json.loads((out / "results.json").read_text())


def differences(result: dict[str, Any]) -> list[str]:
    return [what for what in EVERYTHING if not result[what]]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_at_random_moments(results, world_size):
    killed = [results[f"killed{world_size}_{i}"] for i in range(5)]
    for result in killed:
        assert result["killed"] == [-9] * world_size
        assert result["resumed"] == [0] * world_size
        assert differences(result) == []
    assert sum(result["step"] % STEPS_PER_EPOCH != 0 for result in killed) >= 3, "too few were inside an epoch"


def test_starting_the_epoch_again_is_caught(results):
    assert "weights" in differences(results["control"])


def test_killed_while_a_checkpoint_was_written(results):
    result = results["cut_off"]
    assert result["killed"] == [-9]
    assert result["step"] == 3  # the first checkpoint; half of the second lay beside it
    assert len(result["leftovers"]) == 1
    assert result["gone"] == []
    assert differences(result) == []


@pytest.mark.parametrize(("name", "code"), [("sigint", 130), ("sigterm", 143)])
def test_signals_stop_all_processes_after_the_step(results, name, code):
    result = results[name]  # Ctrl-C reaches both processes, SIGTERM here the first alone
    assert result["stopped"] == [code, code]
    assert result["step"] % 3 != 0 or result["step"] % STEPS_PER_EPOCH == 0, "no checkpoint of its own was written"
    assert differences(result) == []


def test_dropout_needs_no_generator_state(results):
    assert differences(results["dropout"]) == []


def test_a_finished_run_says_so(results):
    assert results["reference1"]["again"] == [0]


# Where a signal can be noticed, and at which of 3 x 5 steps: inside an epoch, inside a validation, between epochs.
ACCUMULATED = ("--trainer.accumulate_grad_batches", "2")  # 3 steps an epoch
POINTS = [
    (("on_train_batch_end", 2), ()),
    (("on_train_batch_end", 7), ()),
    (("on_validation_batch_end", 10), ()),
    (("on_train_epoch_start", 10), ()),
    (("on_train_epoch_start", 10), ("--trainer.max_steps", "13")),
    (("on_train_batch_end", 7), ("--trainer.max_steps", "13")),
    (("on_train_batch_end", 4), ACCUMULATED),
    (("on_train_batch_end", 3), ("--trainer.val_check_interval", "2")),
    (("on_validation_batch_end", 2), ("--trainer.val_check_interval", "2")),
    (("on_train_epoch_start", 5), ("--trainer.check_val_every_n_epoch", "2")),
]


def trained(cli: Callable[..., None], data: Path, root: Path, stop: Any = None, *extra: str) -> list[Any]:
    """Fit, seeing a signal at `stop`, and return (epoch, batch, pictures) of each step."""
    seen = []
    step = Classifier.training_step

    def traced(self: Classifier, batch: dict, batch_idx: int) -> Any:
        seen.append((self.trainer.current_epoch, batch_idx, batch["index"].tolist()))
        return step(self, batch, batch_idx)

    def agreed(self: SignalFlag, trainer: Any) -> int:
        return 15 if stop == (sys._getframe(1).f_code.co_name, trainer.global_step) else 0

    with patch.object(Classifier, "training_step", traced), patch.object(SignalFlag, "agreed", agreed):
        options = ["--data.root", data, "--data.image_size", 32, "--data.batch_size", 12, "--data.num_workers", 0]
        options += ["--model.weights", "null", "--model.backbone", "mobilenet_v3_small", "--trainer.max_epochs", 3]
        options += ["--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", 1, "--test_after_fit", "false"]
        cli("fit", *options, "--trainer.default_root_dir", root, "--trainer.enable_progress_bar", "false", *extra)
    return seen


@pytest.mark.parametrize(("stop", "extra"), POINTS)
def test_wherever_a_signal_is_noticed(cli, colours, tmp_path, stop, extra):
    whole = trained(cli, colours, tmp_path / "whole", None, *extra)
    with pytest.raises(Interrupted) as caught:
        trained(cli, colours, tmp_path / "parts", stop, *extra)
    assert caught.value.exit_code == 143
    after = trained(cli, colours, tmp_path / "parts", None, *extra, "--resume")
    assert after == whole[len(whole) - len(after) :]
    if extra != ACCUMULATED:
        assert len(whole) - len(after) == stop[1]
    states = []
    for root in (tmp_path / "whole", tmp_path / "parts"):
        (run,) = versions(root, "fit")
        checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        states.append((checkpoint, (run / "metrics.csv").read_text()))
    (a, metrics_a), (b, metrics_b) = states
    assert all(torch.equal(a["state_dict"][name], b["state_dict"][name]) for name in a["state_dict"])
    assert a["loops"] == b["loops"]
    assert metrics_a == metrics_b
